"""The life of the processes that run TFF computations."""
