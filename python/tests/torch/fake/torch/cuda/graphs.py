"""The names of captures."""


class CUDAGraph:
    def capture_begin(self, pool=None):
        raise AssertionError("a capture began")


class graph:
    def __enter__(self):
        raise AssertionError("a capture began")

    def __exit__(self, *_):
        pass
