"""Tasks with a known answer: generated token by token, packed into rows, scored by accuracy.

A task is a source of data like a text: `task:NAME`, with options behind colons, such as
`task:recall:pairs=32:length=256`. `recall`, `palindrome` and `stack` are those of Kimi Linear
(KLR §5.1); `needle`, `variables` and `agent` ask how far back a model can look.
"""

from k3jax.data.tasks.example import Example, Task
from k3jax.data.tasks.long_context import Agent, Needle, Variables
from k3jax.data.tasks.pool import PREFIX, TaskPool, parse
from k3jax.data.tasks.synthetic import Palindrome, Recall, Stack

__all__ = [
    "PREFIX",
    "Agent",
    "Example",
    "Needle",
    "Palindrome",
    "Recall",
    "Stack",
    "Task",
    "TaskPool",
    "Variables",
    "parse",
]
