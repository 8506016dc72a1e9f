"""Print why tests were skipped, from what `pytest -rs` has printed, and fail where a reason is not expected here.

python .ci/check_skips.py OUTPUT [lowest]
"""

import re
import sys
from collections import Counter
from pathlib import Path

EXPECTED = [
    r"needs a CUDA device, and -m gpu",
    r"only root can give a file away",  # as another user
    r"(nodes cannot be made|nothing can be mounted|no memory cgroup can be made) here: .*",  # in a container
]
EXPECTED_ON_LOWEST = [
    r"could not import '.*': .*",  # the libraries of the extra `interop` are not installed
    r"validation is not due by time",  # Lightning before 2.6
    r"NumPy before 2 has no StringDType",
]


def main(output: str, versions: str = "newest") -> None:
    expected = EXPECTED + (EXPECTED_ON_LOWEST if versions == "lowest" else [])
    reasons = Counter[str]()
    for times, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+?(?::\d+)?: (.*)$", Path(output).read_text(), re.MULTILINE):
        reasons[reason] += int(times)
    for reason, times in reasons.most_common():
        print(f"{times:4} skipped: {reason}")
    unexpected = [reason for reason in reasons if not any(re.fullmatch(pattern, reason) for pattern in expected)]
    if unexpected:
        raise SystemExit(f"tests are skipped that should run here: {unexpected}")


main(*sys.argv[1:])
