"""The leader reads rows and feeds every rank, so a worker needs no data (design: "the leader feeds rows").

A background thread packs rows ahead of the trainer; the rows of the next step travel on a process group of their own
while this step is computed, so they never wait behind gradients.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lantrain.cluster.group import Ranks
from lantrain.data.packing import RowStream
from lantrain.errors import UserError

QUEUE_STEPS = 4
"""Steps that are packed ahead: a slow row group then does not stop the trainer."""

HEADER_BYTES = 2048
"""JSON with the step and the epoch, or the leader's error message."""


@dataclass
class Batch:
    """What one rank gets for a step: its rows (n, T+1) int64; on the leader also the stream's state after the step."""

    step: int
    rows: Tensor
    epoch: int
    position: dict[str, int] = field(default_factory=dict)
    state: Any = None


class PackedAhead:
    """Leader only: packs the rows of coming steps in a thread. Errors come out of `next`, where the step needs them."""

    def __init__(self, stream: RowStream, rows_per_step: int) -> None:
        self._queue: queue.Queue[tuple[np.ndarray, Any, dict[str, int]] | BaseException] = queue.Queue(QUEUE_STEPS)
        self._stop = threading.Event()
        self._stream, self._rows = stream, rows_per_step
        self._thread = threading.Thread(target=self._pack, name="row packer", daemon=True)
        self._thread.start()

    def _put(self, item: tuple[np.ndarray, Any, dict[str, int]] | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def _pack(self) -> None:
        try:
            while not self._stop.is_set():
                rows = self._stream.next_rows(self._rows)
                self._put((rows, self._stream.state(), dict(self._stream.position)))
        except BaseException as error:
            self._put(error)

    def next(self) -> tuple[np.ndarray, Any, dict[str, int]]:
        """Rows of the next step (n, T+1), the stream's state after them, and its position."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread; what was packed and not used is dropped (the state of the last used step is what counts)."""
        self._stop.set()
        self._thread.join()


class FixedRows:
    """Leader only: hands out rows that are already there, `rows_per_step` at a time (the validation rows)."""

    def __init__(self, rows: np.ndarray, rows_per_step: int) -> None:
        self._batches = iter(np.split(rows, range(rows_per_step, len(rows), rows_per_step)))

    def next(self) -> tuple[np.ndarray, Any, dict[str, int]]:
        """The next rows (n, T+1); no state, no position."""
        return next(self._batches), None, {}

    def close(self) -> None:
        """Nothing to stop."""


class FeedError(UserError):
    """The leader could not read its data. Raised on every rank at the same step, so a checkpoint can still be made."""


class Feed:
    """Hands each rank its rows, step after step. Every rank calls `next` once a step.

    A message is a header and the rank's rows in one buffer of known size. The receiver asks for it a step ahead: Gloo
    moves nothing until the receiving side has asked.
    """

    def __init__(
        self,
        source: PackedAhead | FixedRows | None,
        ranks: Ranks,
        seq_len: int,
        wide: bool,
        first_step: int,
        tag: int = 0,
    ) -> None:
        """`source` is the leader's (None elsewhere); `wide` when token ids need 32 bits (vocabulary above 65536).

        Feeds that live at the same time need different `tag`s.
        """
        self._source, self._ranks, self._seq_len = source, ranks, seq_len
        # Gloo has no 16-bit unsigned type; the rows travel as bytes.
        self._dtype: Any = np.int32 if wide else np.uint16
        self._step, self._tag = first_step, tag
        self._shares: list[int] = []
        self._sent: list[dist.Work] = []
        self._ahead: Batch | BaseException | tuple[dist.Work, Tensor] | None = None

    def start(self, shares: Sequence[int]) -> None:
        """Put the first step's rows on their way. `shares` are rows a rank, the same list on every rank."""
        self._shares = list(shares)
        self._prefetch()

    def reshare(self, shares: Sequence[int]) -> None:
        """Share out the rows that are not on their way yet otherwise: those after the next call of `next`.

        Every rank does so after the same step, with the same list.
        """
        self._shares = list(shares)

    def next(self, more: bool) -> Batch:
        """This step's rows; when `more`, the next step's are put on their way.

        Raises FeedError on every rank when the leader could not read its data.
        """
        ahead = self._ahead
        if isinstance(ahead, tuple):
            ahead = self._unpack(*ahead)
        if isinstance(ahead, BaseException):
            raise ahead
        assert ahead is not None
        self._step += 1
        self._ahead = None
        if more:
            self._prefetch()
        return ahead

    def _message_bytes(self, rank: int) -> int:
        return HEADER_BYTES + self._shares[rank] * (self._seq_len + 1) * int(np.dtype(self._dtype).itemsize)

    def _prefetch(self) -> None:
        if self._source is not None:
            self._ahead = self._send_step(self._source)
            return
        message = torch.empty(self._message_bytes(self._ranks.rank), dtype=torch.uint8)
        work = dist.irecv(message, 0, group=self._ranks.feed, tag=self._tag)
        assert work is not None
        self._ahead = (work, message)

    def _send_step(self, source: PackedAhead | FixedRows) -> Batch | BaseException:
        for work in self._sent:
            work.wait()
        self._sent = []
        try:
            rows, state, position = source.next()
        except Exception as error:
            # Kept until the step that needs the rows, so that every rank meets it at the same step.
            failure = FeedError(str(error)) if isinstance(error, UserError) else error
            self._send_all(None, {"step": self._step, "error": str(error)[:400]})
            return failure
        pieces = np.split(rows, np.cumsum(self._shares)[:-1])
        self._send_all(pieces, {"step": self._step, "epoch": position.get("epoch", 1)})
        mine = torch.from_numpy(pieces[0].astype(np.int64))
        return Batch(self._step, mine, position.get("epoch", 1), position, state)

    def _send_all(self, pieces: list[np.ndarray] | None, header: dict[str, Any]) -> None:
        encoded = json.dumps(header, ensure_ascii=False).encode().ljust(HEADER_BYTES)
        for rank in range(1, self._ranks.world):
            message = torch.zeros(self._message_bytes(rank), dtype=torch.uint8)
            message[:HEADER_BYTES] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            if pieces is not None and len(pieces[rank]):
                raw = np.ascontiguousarray(pieces[rank], dtype=self._dtype).view(np.uint8)
                message[HEADER_BYTES:] = torch.from_numpy(raw).reshape(-1)
            work = dist.isend(message, rank, group=self._ranks.feed, tag=self._tag)
            assert work is not None
            self._sent.append(work)

    def _unpack(self, work: dist.Work, message: Tensor) -> Batch | FeedError:
        work.wait()
        header = json.loads(message[:HEADER_BYTES].numpy().tobytes())
        if "error" in header:
            return FeedError(f"the leader cannot read its data: {header['error']}")
        if header["step"] != self._step:
            raise RuntimeError(f"rank {self._ranks.rank} expected the rows of step {self._step}, got {header['step']}")
        rows = message[HEADER_BYTES:].numpy().view(self._dtype).reshape(-1, self._seq_len + 1).astype(np.int64)
        return Batch(header["step"], torch.from_numpy(rows), header["epoch"])

    def close(self, wait: bool = True) -> None:
        """Let outstanding sends end (unless a peer is gone: then nobody would take them) and stop packing."""
        for work in self._sent if wait else ():
            work.wait()
        if self._source is not None:
            self._source.close()
