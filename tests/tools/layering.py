# SPDX-License-Identifier: Apache-2.0
"""Which part may include which: the arrows of docs/architecture.md, checked on every #include of include/ and src/.

A link line cannot keep this rule, since all parts end up in one library. Run it alone:
    python3 tests/tools/layering.py [root]
"""
import pathlib
import re
import sys

PUBLIC = "public"  # include/marrow: includes nothing of src/, may be included by everyone
NETWORK_SEES = {"base", "verbs", "cuda"}

# Direct arrows; an arrow may skip levels, so what they reach is allowed too.
ARROWS = {
    "base": set(),
    "cuda": {"base"},
    "verbs": {"base"},
    "bootstrap": {"cuda", "verbs"},
    "memory": {"bootstrap"},
    "topology": {"bootstrap"},
    "gda": {"memory", "topology"},
    "proxy": {"memory", "topology"},
    "core": {"gda", "proxy"},
    "ep": set(),  # the public API only: that proves it suffices
    "cli": {"ep"},
    "networks": NETWORK_SEES,
    "softnic": NETWORK_SEES,
    "softnic_libs": {"verbs"},
    "nccl": {"networks", "memory"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu"}


def reach(part):
    """Every part that `part` may include, itself among them."""
    seen, todo = set(), [part]
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += ARROWS.get(at, ())
    return seen


ALLOWED = {part: reach(part) for part in ARROWS}


def owner(path, root):
    """The part a file belongs to, PUBLIC for include/, None for anything else."""
    parts = path.relative_to(root).parts
    if parts[0] == "include":
        return PUBLIC
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    return None


def target(name, path, root):
    """The part an include names, or None when it is not a file of ours."""
    for base in (path.parent, root / "src", root / "include"):
        candidate = (base / name).resolve()
        if candidate.is_file() and root in candidate.parents:
            return owner(candidate, root)
    if "/" not in name:  # <memory> is the standard's
        return None
    first = name.split("/")[0]
    return first if first in ARROWS else PUBLIC if first == "marrow" else None


def check(root):
    """A sentence for each include that points the wrong way."""
    root = pathlib.Path(root).resolve()
    problems = []
    for folder in ("include", "src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            part = owner(path, root)
            where = path.relative_to(root)
            if part is not None and part != PUBLIC and part not in ARROWS:
                problems.append(f"{where}: part '{part}' is unknown. Next: give it its arrows in {__file__}.")
                continue
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                match = INCLUDE.match(line)
                if match is None:
                    continue
                goal = target(match.group(1) or match.group(2), path, root)
                if goal is None or goal == PUBLIC or part is None:
                    continue
                if part == PUBLIC:
                    problems.append(f"{where}:{number}: a public header includes src/{goal}")
                elif goal not in ALLOWED[part]:
                    problems.append(f"{where}:{number}: {part} may not include {goal}")
    return problems


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2]
    problems = check(root)
    print("\n".join(problems) or "every include follows the arrows")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
