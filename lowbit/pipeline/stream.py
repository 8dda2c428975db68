"""The response to one prompt, streamed."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from lowbit.pipeline.params import Response


class Stream(Iterator[str]):
    """Yields the text of a response in parts of whole characters, without stop strings.

    `response` is None until the iteration ends, then the whole response. `close`, or the end of a `with` block, cancels the
    request.
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
        """Cancels the request."""
        self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
