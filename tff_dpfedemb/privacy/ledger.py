"""The write-ahead ledger: one line a round, on disk before the round's noisy sum is computed.

Epsilon is computed from the ledger alone. A round that was started counts even where its result
was lost, since it may have been seen. Each line carries a digest of all lines before it, so that
a line that is missing, repeated, out of order or from elsewhere is noticed.
"""

import collections
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from tff_dpfedemb.privacy import accounting
from tff_dpfedemb.privacy.plan import PrivacyPlan


class LedgerError(ValueError):
    """The ledger is not the unbroken record of one run."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One started round, as the accountant needs it.

    Attributes:
        round: Its number, from 0. The same number again is the same cohort, run again.
        sampling: As in `PrivacyPlan`.
        relation: As in `PrivacyPlan`.
        sampling_probability: q.
        noise_multiplier: z.
        sensitivity_factor: s.
        clip_norm: C, or None.
        virtual_clients_per_round: V.
        virtual_client_size: m.
        population: N.
        delta: The failure probability the run states its epsilon at.
    """

    round: int
    sampling: str
    relation: str
    sampling_probability: float
    noise_multiplier: float
    sensitivity_factor: int
    clip_norm: float | None
    virtual_clients_per_round: int
    virtual_client_size: int
    population: int
    delta: float

    @classmethod
    def from_plan(cls, plan: PrivacyPlan, round_number: int) -> "Entry":
        """The entry of a round of `plan`."""
        return cls(
            round=round_number,
            sampling=plan.sampling,
            relation=plan.relation,
            sampling_probability=plan.sampling_probability,
            noise_multiplier=plan.noise_multiplier,
            sensitivity_factor=plan.sensitivity_factor,
            clip_norm=plan.clip_norm,
            virtual_clients_per_round=plan.virtual_clients_per_round,
            virtual_client_size=plan.virtual_client_size,
            population=plan.population,
            delta=plan.target_delta,
        )

    @property
    def event(self) -> str:
        """The event in dp_accounting's words."""
        return repr(
            accounting.round_event(
                self.sampling_probability, self.noise_multiplier / self.sensitivity_factor
            )
        )


def _digest(previous: str, record: Mapping[str, Any]) -> str:
    """The chained digest of a record that follows `previous`."""
    content = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256((previous + content).encode()).hexdigest()[:32]


def _line(entry: Entry, previous: str) -> tuple[str, str]:
    """The line of an entry, and its digest."""
    record = {**dataclasses.asdict(entry), "event": entry.event}
    digest = _digest(previous, record)
    return json.dumps({**record, "chain": digest}) + "\n", digest


def _parse(path: str, number: int, line: bytes, previous: str) -> tuple[Entry, str]:
    """Reads one whole line and checks that it continues the chain."""
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
        chain = record.pop("chain")
        event = record.pop("event")
        entry = Entry(**record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LedgerError(f"{where}: not a ledger line ({error})") from None
    if chain != _digest(previous, {**record, "event": event}):
        raise LedgerError(f"{where}: does not continue the lines before it; the ledger was altered")
    if event != entry.event:
        raise LedgerError(
            f"{where}: its event {event} does not follow from its parameters, {entry.event}"
        )
    return entry, chain


class Ledger:
    """The rounds that a run has started.

    Attributes:
        path: The file.
        entries: One for each line, in order.
        repaired: Whether the last line was torn by a crash and has been counted as a whole round.
    """

    def __init__(self, path: str, plan: PrivacyPlan | None = None):
        """Reads a ledger.

        Args:
            path: The file; if it does not exist, the ledger is empty.
            plan: The plan of the run that will append to it. With a plan, a torn last line is
                completed in the file; without one the file is left as it is.

        Raises:
            LedgerError: If a line is missing, repeated, out of order, torn before the end, or not
                of this run's plan.
        """
        self.path = path
        self.entries: list[Entry] = []
        self.repaired = False
        self._chain = ""
        self._plan = plan
        content = b""
        if os.path.exists(path):
            with open(path, "rb") as file:
                content = file.read()
        *lines, torn = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            entry, self._chain = _parse(path, number, line, self._chain)
            highest = max((e.round for e in self.entries), default=-1)
            if not 0 <= entry.round <= highest + 1:
                raise LedgerError(
                    f"{path}, line {number}: round {entry.round} after round {highest}; "
                    "rounds in between are missing"
                )
            if plan is not None and entry != Entry.from_plan(plan, entry.round):
                raise LedgerError(f"{path}, line {number}: not of this run's privacy plan")
            self.entries.append(entry)
        if torn:
            self._repair(torn, len(content) - len(torn))

    def _repair(self, torn: bytes, good_bytes: int) -> None:
        """Counts a torn last line as the round that it was being written for."""
        start = re.match(rb'\{"round": (\d+),', torn)
        round_number = min(int(start[1]), self.num_rounds) if start else self.num_rounds
        if self._plan is not None:
            with open(self.path, "r+b") as file:
                file.truncate(good_bytes)
            self.append(round_number)
        elif self.entries:
            self.entries.append(dataclasses.replace(self.entries[-1], round=round_number))
        else:
            raise LedgerError(
                f"{self.path}: its only line is torn; no round's parameters can be read"
            )
        self.repaired = True

    @property
    def num_rounds(self) -> int:
        """How many different rounds were started."""
        return max((e.round for e in self.entries), default=-1) + 1

    def append(self, round_number: int) -> None:
        """Records, durably, that a round is about to be computed.

        Args:
            round_number: At most one above the highest so far; lower ones are rounds run again.

        Raises:
            LedgerError: If the ledger was opened without a plan or rounds would be missing.
        """
        if self._plan is None:
            raise LedgerError(f"{self.path}: opened for reading only, without a plan")
        if not 0 <= round_number <= self.num_rounds:
            raise LedgerError(
                f"{self.path}: round {round_number} after {self.num_rounds} started rounds"
            )
        entry = Entry.from_plan(self._plan, round_number)
        line, chain = _line(entry, self._chain)
        created = not os.path.exists(self.path)
        with open(self.path, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if created:
            _sync_folder(os.path.dirname(os.path.abspath(self.path)))
        self.entries.append(entry)
        self._chain = chain

    def rounds(
        self, *, user_level: bool = True, planned_rounds: int = 0
    ) -> dict[tuple[float, float], int]:
        """What the accountant composes.

        Args:
            user_level: Whether noise is taken relative to one user's sensitivity (with s) or to one
                virtual client's (s = 1).
            planned_rounds: Rounds up to this number are counted once even if not started yet.

        Returns:
            Number of rounds by (sampling probability, effective noise multiplier). Attempts at the
            same round share a cohort and are one entry of smaller noise.
        """
        attempts: dict[int, list[Entry]] = collections.defaultdict(list)
        for entry in self.entries:
            attempts[entry.round].append(entry)
        if self._plan is not None:
            for number in range(self.num_rounds, planned_rounds):
                attempts[number].append(Entry.from_plan(self._plan, number))
        counts: collections.Counter[tuple[float, float]] = collections.Counter()
        for entries in attempts.values():
            noise = accounting.combined_noise_multiplier(
                e.noise_multiplier / (e.sensitivity_factor if user_level else 1) for e in entries
            )
            counts[entries[0].sampling_probability, noise] += 1
        return dict(counts)

    def epsilon(self, delta: float, *, user_level: bool = True, planned_rounds: int = 0) -> float:
        """The epsilon of all started rounds; see `rounds` for the arguments."""
        return accounting.epsilon(
            self.rounds(user_level=user_level, planned_rounds=planned_rounds), delta
        )


def _sync_folder(folder: str) -> None:
    """Makes a new file's name as durable as its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
