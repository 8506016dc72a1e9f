"""The caches with a name, told to people: by job, in a line each."""

from lightning_stocache.cache.contents import Contents
from lightning_stocache.insight.inventory import describe, of_jobs
from lightning_stocache.node.files import Geometry, Manifest
from lightning_stocache.node.named import NamedSegment
from lightning_stocache.node.open_files import Process


def segment(name: str, contents: Contents | None = None, *, in_use: bool = False) -> NamedSegment:
    contents = contents or Contents(Manifest(Geometry(10, 5), "Photos"), "", 4)
    return NamedSegment(name, (1, 2), 3 * 2**20, in_use, contents)


def test_a_job_is_known_by_the_name_that_it_was_given() -> None:
    """A job's name means all its caches, whose names have a stage and a number; a cache's name means it alone."""
    there = ["photos", "photos-train0", "photos-val12", "photos-256-test1", "photos-trains", "photos2-train0"]
    meant = {
        "photos": ["photos", "photos-train0", "photos-val12"],
        "photos-train0": ["photos-train0"],
        "photos-256": ["photos-256-test1"],
        "photo": [],
        "photos-": [],
    }
    for name, caches in meant.items():
        assert [found.name for found in of_jobs([name], map(segment, there))] == caches
    assert [found.name for found in of_jobs(["photos-256", "photos-train0"], map(segment, there))] == [
        "photos-train0",
        "photos-256-test1",
    ]
    assert len(of_jobs([], map(segment, there))) == len(there)


def test_a_line_names_the_users_and_the_damage() -> None:
    """It has the first eight ids of users with one command line, a damaged header, and the node of a cache."""
    processes = [Process(pid, "python train.py") for pid in range(1, 12)] + [Process(99, "python other.py")]
    told = describe(segment("photos", in_use=True), processes)
    assert told.endswith("used by 1, 2, 3, 4, 5, 6, 7, 8 and 3 more (python train.py); 99 (python other.py)")
    assert describe(segment("photos", in_use=True)).endswith("used by a process that cannot be seen from here")
    damaged = Contents(None, "is damaged: its header is cut off")
    expected = "photos: a cache that is damaged: its header is cut off, 3 MiB, used by nobody"
    assert describe(segment("photos", damaged)) == expected
    part = Contents(Manifest(Geometry(10, 5, start=5), "Photos", node=1, nodes=2), "", 4)
    assert "Photos, 4 of 5 slots filled (node 1 of 2), 3 MiB" in describe(segment("p", part))
