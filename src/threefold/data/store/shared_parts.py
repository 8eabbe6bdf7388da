"""The parts of one store, made by tasks on many hosts that do not know of each other.

Which parts a task makes is arithmetic: task i of n makes parts i, i + n, i + 2n, ... of the plan, which the source
alone decides. A part that exists is not made again; one that is made twice has equal bytes, and one copy stays. So
any task may end at any point, be started again, or run twice. Parts are in a folder that all hosts see, or below the
store's address, each as one object that is put if absent. In the end one process collects them all, or names the
problems.
"""

import io
import shutil
import tarfile
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from threefold.data.store.part_processes import make_in_processes
from threefold.data.store.parts import EncodedPart, PartDone, PartMaker, plan_parts
from threefold.data.store.prepare import PARTS, STORE_NAME, found
from threefold.data.text.source import log_error
from threefold.errors import DataError
from threefold.mesh.environment import num_cores, variables
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.upload import refuse_filled

_NUM_NAMED = 5
_NUM_AT_ONCE = 8


@dataclass(frozen=True)
class SharedParts:
    """Where all tasks put the parts of a request. Pickles, so that other processes can make some.

    Args:
        maker: its folder is one that all hosts see; with an address, the one where this process collects them.
        address: that of the store.
    """

    maker: PartMaker
    address: str | None

    @property
    def plan(self) -> list[EncodedPart]:
        return plan_parts(self.maker.source.pieces)

    @property
    def _place(self) -> ObjectStore:
        return open_store(str(self.address), variables())

    def _key(self, part: EncodedPart) -> str:
        return f"{self.maker.folder.name}/{part.number:05}"

    def missing(self) -> list[EncodedPart]:
        """The parts that are not there; a ConfigError if the address holds anything else, or the store."""
        if self.address is not None:
            refuse_filled(self._place)
            keys = {each.key for each in self._place.list(self.maker.folder.name)}
            return [part for part in self.plan if self._key(part) not in keys]
        folder = self.maker.folder
        if found(folder.parent / STORE_NAME, folder.name.removeprefix(PARTS)):
            return []
        return [part for part in self.plan if not self.maker.finished(part)]

    def make(self, part: EncodedPart) -> PartDone:
        """Makes a part and puts it where it belongs; of one with bad documents, nothing is kept."""
        if self.address is None:
            self.maker.folder.mkdir(parents=True, exist_ok=True)
            return self.maker.make(part)
        with tempfile.TemporaryDirectory(prefix="threefold-part-") as scratch:
            maker = replace(self.maker, folder=Path(scratch, self.maker.folder.name))
            maker.folder.mkdir()
            done = maker.make(part)
            if not done.log.num_bad:
                archive = shutil.make_archive(
                    f"{maker.folder}-{part.number}", "tar", maker.folder
                )
                # Or another copy exists.
                self._place.create(self._key(part), Path(archive).read_bytes())
        return done

    def remove(self) -> None:
        """Removes the parts at the address."""
        self._place.delete([each.key for each in self._place.list(self.maker.folder.name)])

    def make_share(self, index: int, count: int, *, num_workers: int | None) -> int:
        """Makes every `count`-th part from part `index` on that is missing, and returns their number.

        Raises:
            DataError: documents cannot be read. RunError: a process was killed.
        """
        its = [part for part in self.missing() if part.number % count == index]
        with closing(
            make_in_processes(self, its, num_workers=num_workers or num_cores())
        ) as made:
            for done in made:
                if done.log.num_bad:
                    raise log_error(self.maker.source, done.log)
        return len(its)

    def collect(
        self, maker: PartMaker, missing: Sequence[EncodedPart]
    ) -> Generator[PartDone, None, None]:
        """The parts that others have made, as `prepare` asks for those that its folder lacks.

        Raises:
            DataError: some are missing, cut, damaged, or of another number or source; they are named.
        """
        if self.address is not None:
            with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:
                list(threads.map(self._fetch, missing))
        wrong = []
        for part in missing:
            if done := maker.finished(part):
                yield done
            else:
                wrong.append(f"part {part.number} {self._fault(part)}")
        if wrong:
            more = f"; and {len(wrong) - _NUM_NAMED:,} more" if len(wrong) > _NUM_NAMED else ""
            raise DataError(
                f"{'; '.join(wrong[:_NUM_NAMED])}{more}",
                expected=f"the {len(self.plan):,} parts of {maker.source.name}, each once, where all hosts write",
                fix="run the same   threefold data prepare   again: only these parts are made",
            )

    def _fetch(self, part: EncodedPart) -> None:
        """Puts a part into the folder; a DataError, and it is removed, if it is not what was sealed."""
        place, key, folder = self._place, self._key(part), self.maker.folder
        if (fetched := place.get(key)) is None:
            return
        try:
            with tarfile.open(fileobj=io.BytesIO(fetched[0])) as archive:
                # Not by `extractall`, whose filters Python has from 3.11.4 on.
                for member in archive:
                    if member.isdir():
                        continue
                    content = archive.extractfile(member) if member.isreg() else None
                    path = (folder / member.name).resolve()
                    if content is None or path.parent != folder.resolve():
                        raise tarfile.ReadError(f"{member.name!r} is no file of a part")
                    path.write_bytes(content.read())
            if (done := self.maker.finished(part)) is None:
                raise tarfile.ReadError(f"part {part.number} {self._fault(part)}")
            self.maker.read(done)
        except (tarfile.TarError, ValueError, DataError) as error:
            place.delete([key])
            raise DataError(
                f"{place.url}/{key} is not what was written: {error}",
                expected=f"part {part.number} as it was encoded",
                fix="run the same   threefold data prepare   again: only this part is made again",
            ) from error

    def _fault(self, part: EncodedPart) -> str:
        """Why a part is not finished, in words; a seal begins with the source and number that it is of."""
        seal = self.maker.path(part, "json")
        return (
            f"is truncated, or its seal is another part's: {seal.read_bytes()[:80]!r}"
            if seal.exists()
            else "is missing"
        )
