"""Models in memory: names, versions, and the moves of aliases; which version a reference means. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from schemas.base import Message
from schemas.errors import BadInput, NotFound, Unavailable
from schemas.model_pages import ModelLine, ModelSummary
from schemas.models.commands import MESH_RULE
from schemas.models.reference import DIGEST_LEAST, is_digest, is_number
from schemas.models.version import AliasMove, ModelVersion, NamedModel

MOST_NEAR = 5
"""How many near names an error lists."""


class ModelIndex:
    """The registry's records. `take` brings one in, in any order and as often as it comes."""

    def __init__(self) -> None:
        self.names: dict[str, NamedModel] = {}
        self._versions: dict[str, dict[int, ModelVersion]] = {}
        self._moves: dict[str, dict[str, dict[int, AliasMove]]] = {}
        self._of_digest: dict[str, dict[str, int]] = {}  # by model, by digest
        self._of_job: dict[str, dict[str, int]] = {}  # by model, by job

    def take(self, record: Message) -> None:
        """Takes over a record: of a model's name, of a version, or of a move."""
        if isinstance(record, NamedModel):
            self.names[record.name] = record
        elif isinstance(record, ModelVersion):
            self._versions.setdefault(record.name, {})[record.version] = record
            self._of_digest.setdefault(record.name, {})[record.sha256] = record.version
            if record.lineage.job:
                self._of_job.setdefault(record.name, {})[record.lineage.job] = record.version
        elif isinstance(record, AliasMove):
            of_alias = self._moves.setdefault(record.name, {}).setdefault(record.alias, {})
            of_alias[record.number] = record

    # --- models and versions --------------------------------------------------------------------------------
    def newest_number(self, name: str) -> int:
        """The highest number of a version of this model, removed ones too; 0 if there is none."""
        return max(self._versions.get(name, ()), default=0)

    def versions(self, name: str, *, removed: bool = False) -> list[ModelVersion]:
        """The versions of a model by number.

        Raises:
            NotFound: there is no such model; the text says which are near.
        """
        self.require(name)
        there = self._versions.get(name, {})
        return [there[number] for number in sorted(there) if removed or there[number].removed_at is None]

    def require(self, name: str) -> None:
        """Raises `NotFound`, with near names, if there is no such model."""
        if name not in self._versions:
            raise NotFound(f"there is no model {name}; {self._near(name)}", model=name)

    def _near(self, name: str) -> str:
        names = sorted(self._versions)
        if not names:
            return "none is registered yet: dmsc model register, or `register:` in a job file"
        near = get_close_matches(name, names, MOST_NEAR, 0.5)
        if near:
            return f"near it is {', '.join(near)}" if len(near) == 1 else f"near it are {', '.join(near)}"
        more = f" and {len(names) - MOST_NEAR} more" if len(names) > MOST_NEAR else ""
        return f"there are {', '.join(names[:MOST_NEAR])}{more}"

    def with_digest(self, name: str, sha256: str) -> ModelVersion | None:
        """The version of the model whose weights have this digest."""
        number = self._of_digest.get(name, {}).get(sha256)
        return None if number is None else self._versions[name][number]

    def of_job(self, name: str, job: str) -> ModelVersion | None:
        """The version that the job's weights are."""
        number = self._of_job.get(name, {}).get(job)
        return None if number is None else self._versions[name][number]

    def summaries(self) -> list[ModelSummary]:
        """All models by name."""
        return [self._summary(name) for name in sorted(self._versions)]

    def _summary(self, name: str) -> ModelSummary:
        versions = self.versions(name)
        newest = versions[-1] if versions else None
        named = self.names.get(name)
        return ModelSummary(
            name=name,
            owner="" if named is None else named.owner,
            versions=len(versions),
            newest=None if newest is None else newest.version,
            sha256="" if newest is None else newest.sha256,
            registered_at=None if newest is None else newest.registered_at,
            aliases=self.aliases(name),
            approvals={} if named is None else named.approvals,
        )

    # --- references -----------------------------------------------------------------------------------------
    def find(self, name: str, reference: str = "", *, removed: bool = False) -> ModelVersion:
        """The version that is meant: by number, alias or digest; without a reference the newest.

        Raises:
            NotFound: there is none, or it was removed; the text says which there are.
            BadInput: a digest's beginning fits several.
        """
        self.require(name)
        found = self._find(name, reference, self._versions[name])
        if found.removed_at is not None and not removed:
            by = f" by {found.removed_by}" if found.removed_by else ""
            alias = "" if is_number(reference) or is_digest(reference) else f"{name}@{reference} is "
            raise NotFound(f"{alias}{found.reference}, which was removed{by}; {self._others(name)}")
        return found

    def _find(self, name: str, reference: str, there: dict[int, ModelVersion]) -> ModelVersion:
        if not reference:
            living = [version for version in there.values() if version.removed_at is None]
            if not living:
                raise NotFound(f"all versions of {name} were removed")
            return max(living, key=lambda version: version.version)
        if is_number(reference) and (int(reference) in there or len(reference) < DIGEST_LEAST):
            if int(reference) not in there:
                raise NotFound(f"there is no version {name}@{reference}; {self._others(name)}")
            return there[int(reference)]
        move = self.last_move(name, reference)
        if move is not None and move.version is not None:
            if move.version not in there:
                raise Unavailable(f"{name}@{move.version} is still being read: ask again in a moment")
            return there[move.version]
        if is_digest(reference):
            fitting = [version for version in there.values() if version.sha256.startswith(reference)]
            if len(fitting) > 1:
                several = ", ".join(version.reference for version in fitting[:MOST_NEAR])
                raise BadInput(f"{name}@{reference} may be {several}: give more digits")
            if fitting:
                return fitting[0]
        raise NotFound(f"there is no {name}@{reference}; {self._others(name)}")

    def _others(self, name: str) -> str:
        numbers = [str(version.version) for version in self.versions(name)]
        aliases = [f"{alias} ({number})" for alias, number in sorted(self.aliases(name).items())]
        text = (
            f"its versions are {'…, ' if len(numbers) > 8 else ''}{', '.join(numbers[-8:]) or 'all removed'}"
        )
        return f"{text}; its aliases are {', '.join(aliases[:8])}" if aliases else text

    def stored_at(self, url: str) -> ModelVersion | None:
        """The newest version whose files lie in this folder."""
        found = [version for version in self.each() if version.store.rstrip("/") == url.rstrip("/")]
        return max(found, key=lambda version: version.registered_at, default=None)

    def is_in_use(self, folder: str) -> bool:
        """Whether files in this folder are those of a version that was not removed."""
        return any(each.store == folder for each in self.each() if each.removed_at is None)

    # --- aliases --------------------------------------------------------------------------------------------
    def aliases(self, name: str) -> dict[str, int]:
        """What the model's aliases name now."""
        last = {alias: moves[max(moves)].version for alias, moves in self._moves.get(name, {}).items()}
        return {alias: version for alias, version in last.items() if version is not None}

    def last_move(self, name: str, alias: str) -> AliasMove | None:
        """The move of the alias that is in force."""
        moves = self._moves.get(name, {}).get(alias)
        return None if not moves else moves[max(moves)]

    def moves(self, name: str, alias: str | None = None) -> list[AliasMove]:
        """The moves of one alias of the model, or of all, oldest first.

        Raises:
            NotFound: there is no such model, or no such alias ever was.
        """
        self.require(name)
        named = self._moves.get(name, {})
        if alias is not None and alias not in named:
            raise NotFound(f"{name} never had an alias {alias}; {self._others(name)}")
        chosen = named if alias is None else {alias: named[alias]}
        found = [move for moves in chosen.values() for move in moves.values()]
        return sorted(found, key=lambda move: (move.at, move.alias, move.number))

    def named_at(self, name: str, alias: str, at: float) -> AliasMove | None:
        """The move that was in force at a time; None before the first one.

        By numbers, not by clocks: a clock that was set back hides no move.
        """
        moves = self._moves.get(name, {}).get(alias, {})
        ordered = [moves[number] for number in sorted(moves)]
        latest, times = 0.0, []
        for move in ordered:
            latest = max(latest, move.at)
            times.append(latest)
        place = bisect_right(times, at)
        return ordered[place - 1] if place else None

    def naming(self, name: str, version: int) -> list[str]:
        """The aliases that name this version now."""
        return sorted(alias for alias, number in self.aliases(name).items() if number == version)

    # --- lineage --------------------------------------------------------------------------------------------
    def line(self, version: ModelVersion) -> ModelLine:
        """The version and its ancestors, the nearest first, and the versions that began with it."""
        line, missing = self.ancestors(version)
        children = (each.reference for each in self.each() if each.lineage.parent == version.reference)
        return ModelLine(versions=tuple(line), children=tuple(children), missing=missing)

    def ancestors(self, version: ModelVersion) -> tuple[list[ModelVersion], str]:
        """The version and those that it descends from, the nearest first; and a parent that nobody knows."""
        line, seen, missing = [version], {version.reference}, ""
        while (parent := line[-1].lineage.parent) and parent not in seen:
            name, _, number = parent.rpartition("@")
            found = self._versions.get(name, {}).get(int(number)) if is_number(number) else None
            if found is None:
                missing = parent
                break
            seen.add(parent)
            line.append(found)
        return line, missing

    def each(self) -> Iterator[ModelVersion]:
        """All versions, removed ones too, by name and number."""
        for name in sorted(self._versions):
            yield from self.versions(name, removed=True)

    # --- rules ----------------------------------------------------------------------------------------------
    def approvals_wanted(self, name: str, alias: str) -> int:
        """How many approvals a version needs first: the model's rule for this alias, else the mesh's."""
        for key in (name, MESH_RULE):
            named = self.names.get(key)
            if named is not None and alias in named.approvals:
                return named.approvals[alias]
        return 0

    def taking(self, records: Iterable[Message]) -> ModelIndex:
        """Takes over several records; returns this index."""
        for record in records:
            self.take(record)
        return self
