"""Progress of long work: a bar on a terminal, lines in a log."""

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

SECONDS = 60.0  # between two lines of a log


class TokenProgress(Progress):
    """
    Of work whose tasks count `tokens` besides: done and total, tokens per second of this run, time gone and time left.
    Where the output is no terminal, and a bar would be seen at the end alone, it is printed every minute.
    """

    def __init__(self):
        columns = (BarColumn(), MofNCompleteColumn(), _Rate(""), TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(TextColumn("{task.description}"), *columns)
        self.printed = time.monotonic()

    def update(self, *args, **fields) -> None:
        """As rich's."""
        super().update(*args, **fields)
        if not self.console.is_terminal and time.monotonic() - self.printed >= SECONDS:
            self.printed = time.monotonic()
            self.console.print(self.get_renderable())


class _Rate(TextColumn):
    """Tokens per second of the run so far."""

    def render(self, task):
        return Text(f"{task.fields['tokens'] / max(task.elapsed or 0, 1e-9):,.0f} tokens/s")
