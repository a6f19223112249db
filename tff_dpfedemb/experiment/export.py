"""The trained backbone as a thing to ship: a SavedModel, its card, and its privacy statement."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpfedemb import atomic
from tff_dpfedemb.models import embedding_model as embedding_model_lib
from tff_dpfedemb.models import exported, pretrained
from tff_dpfedemb.privacy import statement as statement_lib

CARD = "MODEL_CARD.md"
STATEMENT = "privacy.json"


def _model_card(method: str, facts: Mapping[str, Any], statement: Mapping[str, Any]) -> str:
    """The card: what the model is, how to use it, and what privacy it gives."""
    height, width, channels = facts["image_shape"]
    return f"""# Image embedding model ({facts["backbone"]}, {facts["num_weights"]:,} weights)

Trained by {method} on the task `{facts["task"]["name"]}`.

- **Input** `images`: uint8, shape (n, {height}, {width}, {channels}), pixels as they are.
- **Output** `embeddings`: float32, shape (n, {facts["embedding_dim"]}), each of L2 norm 1.
- The similarity of two images is 1 - |x - y|^2 / 4, between 0 and 1.

```python
model = tf.saved_model.load("export")
embeddings = model(images)
```

## Privacy

{statement_lib.in_words(statement)}

The same in numbers: `{STATEMENT}`.

## Data

```json
{json.dumps(facts["task"], indent=2)}
```
"""


def export(
    path: str,
    model: embedding_model_lib.EmbeddingModel,
    trainable: Sequence[np.ndarray],
    frozen: Sequence[np.ndarray],
    *,
    init_seed: int,
    start: pretrained.InitialWeights | None,
    method: str,
    task_facts: Mapping[str, Any],
    statement: Mapping[str, Any],
) -> None:
    """Writes the model, its card and its privacy statement to a folder, whole or not at all.

    Args:
        path: The folder; an earlier export there is replaced.
        model: The architecture.
        trainable: The backbone's trainable weights.
        frozen: The backbone's other weights.
        init_seed: Seed of the untrained backbone, by which it can be built again for comparison.
        start: The weights that training started from, None for those of `init_seed`.
        method: How it was trained, in words.
        task_facts: What `Task.describe` says, and the task's name.
        statement: The privacy statement.
    """
    with atomic.replacing(path) as new:
        exported.with_weights(model, trainable, frozen).save(new)
        if start is not None:
            started = exported.with_weights(model, start.trainable, start.non_trainable)
            started.save(os.path.join(new, exported.INITIAL))
        facts = exported.write_facts(new, model, init_seed, {"task": dict(task_facts)})
        atomic.write_json(os.path.join(new, STATEMENT), dict(statement))
        atomic.write_text(os.path.join(new, CARD), _model_card(method, facts, statement))
