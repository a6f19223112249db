"""Users to cohorts to virtual clients, and the pipeline that runs inside the worker."""
