"""The docstrings: all that is public has one, and their examples run."""

from __future__ import annotations

import doctest
import inspect
import unittest
from collections.abc import Iterator

import leasehold
from leasehold import ops


def documented() -> Iterator[tuple[str, str | None]]:
    """The public objects and their members, with their docstrings."""
    public = [(name, getattr(leasehold, name)) for name in leasehold.__all__]
    public += [(f"ops.{name}", getattr(ops, name)) for name in ops.__all__]
    for name, of in public:
        if not callable(of):
            continue
        yield name, of.__doc__
        if inspect.isclass(of) and not issubclass(of, BaseException):
            # `Buffer` has its methods from a base that has no public name.
            members = {k: v for c in reversed(of.__mro__[:-1]) for k, v in vars(c).items()}
            for member, value in members.items():
                if not member.startswith("_"):
                    yield f"{name}.{member}", value.__doc__


class Documentation(unittest.TestCase):
    def test_all_that_is_public_has_a_docstring(self) -> None:
        self.assertEqual([name for name, text in documented() if not text], [])

    def test_the_examples_run(self) -> None:
        ran = 0
        for name, text in documented():
            test = doctest.DocTestParser().get_doctest(text or "", {}, name, None, 0)
            out: list[str] = []
            result = doctest.DocTestRunner(verbose=False).run(test, out=out.append)
            self.assertEqual(result.failed, 0, "".join(out))
            ran += result.attempted
        self.assertGreater(ran, 10)


if __name__ == "__main__":
    unittest.main()
