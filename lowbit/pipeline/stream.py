"""The answer to one prompt as it comes."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from lowbit.pipeline.params import Response


class Stream(Iterator[str]):
    """Pieces of an answer, whole characters each; `response` is the whole one as soon as there are no more, None before.

    Nothing of a stop string is in the pieces. `close`, or the end of a `with` block, gives up what has not come.
    """

    def __init__(self, pieces: Generator[str, None, Response]) -> None:
        self._pieces = pieces
        self.response: Response | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as ended:
            self.response = ended.value if self.response is None else self.response
            raise StopIteration from None

    def close(self) -> None:
        """Ends the request where it is."""
        self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
