"""Record the samples that a user's script trains on.

`repro run --check data` compares them (launch/sample_checks.py).

An epoch is one iteration over a DataLoader of torch, or of a class derived from it (accelerate,
torchdata), that yields the last batch before an optimizer's step, or batches before several steps.
Evaluation does neither. Samples are known by checksums of their content and, where the sampler
draws them, by their indices: not those of an iterable dataset, or of a loader that gets its batches
from another rank. Standard library; torch is the script's own; Python 3.9.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import zlib
from typing import Any, Callable, Iterator

LIMIT = 100_000  # samples of a rank that are recorded
epochs: list[Epoch] = []
# the loader that runs now: batches of loaders inside of it are not counted
drawing: Epoch | None = None
last: Epoch | None = None  # the loader that yielded the last batch
recorded = steps = 0
errors: list[str] = []


class Epoch:
    def __init__(self, loader: Any) -> None:
        # indices of each batch, by the order in which they are fetched
        self.drawn: list[list[int]] = []
        self.content: list[list[int]] = []  # checksums of each batch that was yielded
        self.yielded = self.trained = 0  # batches
        self.intervals = set[int]()  # the numbers of steps that were made before its batches
        self.ended = self.is_last = False
        self.skipped = getattr(loader, "skip_batches", 0) or 0
        self.subset = subset(getattr(loader, "dataset", None))  # its indices
        # accelerate: rank 0 draws for all ranks
        self.from_rank_0 = type(loader).__name__ == "DataLoaderDispatcher"
        samplers = list(nested(loader))
        names = [type(each).__name__ for each in samplers]
        self.fields = {
            "sampler": next((name for name in reversed(names) if name != "BatchSampler"), ""),
            "batch_size": max(getattr(each, "batch_size", 0) or 0 for each in [loader, *samplers]),
            "batches": length(loader),
            "length": length(getattr(loader, "dataset", None)),
            "subset": zlib.crc32(repr(self.subset).encode()) if self.subset else None,
            "workers": getattr(loader, "num_workers", 0) or 0,
            **{
                name: any(getattr(each, name, False) for each in samplers)
                for name in ("replacement", "drop_last", "even_batches")
            },
            "shard": next(
                (
                    [each.num_replicas, each.rank]
                    for each in samplers
                    if hasattr(each, "num_replicas")
                ),
                None,
            ),
            "continues": bool(
                self.skipped
                or "SkipBatchSampler" in names
                or getattr(loader, "next_iter_state", None)
            ),
        }

    def take(self, batch: Any) -> None:
        """Count a batch that the script gets."""
        global last, recorded
        last = self
        if self.intervals and steps > max(self.intervals):
            # before a step: with the last batch of another loader, if it was not this one
            self.trained = self.yielded
        self.yielded += 1
        self.intervals = {*sorted(self.intervals)[:1], steps}
        if recorded > LIMIT or errors:
            return
        try:
            sums = checksums(batch)
        except Exception as error:  # the script goes on
            sums = []
            if self.from_rank_0 or len(self.drawn) < self.yielded + self.skipped:
                errors.append(f"{type(error).__name__}: {error}"[:200])
        self.content.append(sums)
        recorded += len(sums)

    @property
    def is_trained(self) -> bool:
        return self.is_last or len(self.intervals) > 1

    def describe(self) -> dict[str, Any]:
        ended = self.ended or self.yielded == self.fields["batches"]
        if ended and len(self.intervals) > 1 and steps > max(self.intervals):
            self.trained = self.yielded
        drawn = [] if self.from_rank_0 else flat(self.drawn[self.skipped :][: self.trained])
        indices = [self.subset[each] for each in drawn] if self.subset else drawn
        content = flat(self.content[: self.trained])
        return {
            **self.fields,
            "exact": bool(drawn),
            "steps": [min(self.intervals), max(self.intervals)],
            "finished": ended and self.trained == self.yielded,
            "samples": indices or content,
            "content": content,
        }


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def subset(dataset: Any) -> list[int]:
    """Return the indices of a Subset, also of one of another, in the data set that it is of."""
    indices: list[int] = []
    while any(each.__name__ == "Subset" for each in type(dataset).__mro__):
        own = list(map(operator.index, dataset.indices))
        dataset, indices = dataset.dataset, [own[each] for each in indices] if indices else own
    return indices


def nested(loader: Any) -> Iterator[Any]:
    """Yield a loader's samplers, from the outermost to the one that draws samples."""
    each = loader
    while each is not None:
        inner = getattr(each, "batch_sampler", None)
        each = getattr(each, "sampler", None) if inner is None else inner
        if each is not None:
            yield each


def length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # of a dataset without a length, or of the user's own
        return None


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if hasattr(value, "untyped_storage"):
        yield name, value.detach()
    elif hasattr(value, "items"):
        for key, each in value.items():
            yield from tensors(each, str(key))
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from tensors(each, f"{name}.{number}")


def checksums(batch: Any) -> list[int]:
    """Return a checksum per sample of a batch, without padding: what the attention mask hides."""
    found = {name: each for name, each in tensors(batch) if each.dim()}
    if not found:
        raise ValueError("a batch holds no tensor")
    count = len(next(iter(found.values())))
    mask = found.pop("attention_mask", None)
    sums = [0] * count
    for each in found.values():
        for row in range(count if len(each) == count else 0):
            own = (
                each[row]
                if mask is None or mask.shape != each.shape
                else each[row][mask[row].bool()]
            )
            sums[row] = zlib.crc32(content_of(own), sums[row])
    return sums


def content_of(tensor: Any) -> bytes:
    own = tensor.cpu().contiguous()
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())


def install(dataloader: Any) -> None:
    """Watch all loaders. dataloader: the module torch.utils.data.dataloader."""
    loader, iterator = dataloader.DataLoader, dataloader._BaseDataLoaderIter
    loader.__iter__ = iterating(loader.__iter__, iterator)
    iterator.__next__ = yielding(iterator.__next__)
    iterator._next_index = drawing_indices(iterator._next_index)

    def init_subclass(cls: Any, **values: Any) -> None:
        super(loader, cls).__init_subclass__(**values)
        if not hasattr(cls.__iter__, "__wrapped__"):
            cls.__iter__ = iterating(cls.__iter__, iterator)

    loader.__init_subclass__ = classmethod(init_subclass)


def install_accelerate(module: Any) -> None:
    """Watch accelerate's loaders, which contain one of torch and fetch a batch ahead.

    module: accelerate.data_loader.
    """
    for name in ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"):
        loader = getattr(module, name, None)
        if loader is not None:
            loader.__iter__ = iterating(loader.__iter__, None)


def iterating(original: Callable[[Any], Any], kind: Any) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        global drawing, recorded
        if drawing is not None or errors:
            return original(self)
        try:
            epoch = Epoch(self)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:200])
            return original(self)
        drawing = epoch
        try:
            iterator = original(self)
        finally:
            drawing = None
        kept = [each for each in epochs if each.is_trained or not each.ended]
        recorded = sum(len(batch) for each in kept for batch in each.content)
        epochs[:] = [*kept, epoch]
        if kind is None or not isinstance(iterator, kind):
            return watched(iterator, epoch)
        iterator._repro_epoch = epoch
        return iterator

    return __iter__


def watched(iterator: Any, epoch: Epoch) -> Iterator[Any]:
    """Yield what a loader with an iteration of its own yields."""
    global drawing
    iterator = iter(iterator)
    while True:
        drawing = epoch
        try:
            batch = next(iterator)
        except StopIteration:
            epoch.ended = True
            return
        finally:
            drawing = None
        epoch.take(batch)
        yield batch


def yielding(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        epoch = None if drawing else self.__dict__.get("_repro_epoch")
        try:
            batch = original(self)
        except StopIteration:
            if epoch:
                epoch.ended = True
            raise
        if epoch:
            epoch.take(batch)
        return batch

    return __next__


def drawing_indices(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def _next_index(self: Any) -> Any:
        index = original(self)
        epoch = drawing or self.__dict__.get("_repro_epoch")
        drawn = index if isinstance(index, (list, tuple)) else [index]
        if epoch and recorded <= LIMIT and all(hasattr(each, "__index__") for each in drawn):
            epoch.drawn.append(list(map(operator.index, drawn)))
        return index

    return _next_index


def on_step(*_: Any) -> None:
    """Mark the batches before an optimizer's step as trained on."""
    global steps
    if last is not None:
        last.is_last = True
        last.trained = last.yielded
    steps += 1


def describe() -> dict[str, Any]:
    """Return the epochs that this rank has trained, or why there are none."""
    trained = [each.describe() for each in epochs if each.is_trained]
    if errors:
        return {"missing": f"a batch or a loader could not be read: {errors[0]}"}
    if recorded > LIMIT:
        return {"missing": f"a rank read more than {LIMIT:,} samples; end the script earlier"}
    if not trained:
        return {
            "missing": (
                "no DataLoader of torch yielded a batch before an optimizer stepped in the rank's"
                " own process"
            )
        }
    return {"epochs": trained}
