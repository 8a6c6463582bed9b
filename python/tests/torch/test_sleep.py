"""Memory that sleeps: the rules over a model of regions, engines' interfaces, and a simulated device."""

import contextlib
import inspect
import random
import sys
import types
import unittest
from unittest import mock

import engine_types
from common import MIB, Simulated
from leasehold import _sleep
from leasehold._errors import InvalidArgumentError, InvalidStateError


class Model:
    """Regions as dictionaries, on a device of limited memory. One call may fail."""

    def __init__(self, limit=1000, host=1000):
        self.limit, self.host, self.fails = limit, host, None
        self.contents, self.kept, self.calls, self.inside = {}, {}, 0, []

    def _call(self):
        self.calls += 1
        if self.calls == self.fails:
            raise MemoryError("call %d fails" % self.calls)

    def held(self):
        return sum(len(c) for name, c in self.contents.items() if name not in self.kept)

    def put(self, name, contents):
        self.contents[name] = contents
        assert self.held() <= self.limit

    @contextlib.contextmanager
    def use(self, name):
        self._call()
        self.contents.setdefault(name, "")
        self.inside.append(name)
        yield
        self.inside.pop()

    @contextlib.contextmanager
    def capture(self, name, graph, options):
        with self.use(name):
            graph.append((name, options))
            yield

    def outside(self):
        return self.use("")

    def suspend(self, name, keep):
        self._call()
        assert name not in self.kept, "given back twice"
        if keep and sum(len(k) for k in self.kept.values() if k) + len(self.contents[name]) > self.host:
            raise MemoryError("host memory is short")
        self.kept[name] = self.contents[name] if keep else None
        return len(self.contents[name])

    def resume(self, name):
        self._call()
        assert name in self.kept, "taken twice"
        if self.held() + len(self.contents[name]) > self.limit:
            raise MemoryError("memory is short")
        kept = self.kept.pop(name)
        self.contents[name] = "?" * len(self.contents[name]) if kept is None else kept

    def bytes(self, name):
        return len(self.contents[name])


class Rules(unittest.TestCase):
    def tags(self, **sizes):
        model = Model()
        tags = _sleep.Tags(model)
        for name, size in sizes.items():
            with tags.use(name):
                model.put(name, name[0] * size)
        return model, tags

    def test_contents_are_kept_where_asked_for(self):
        model, tags = self.tags(weights=300, cache=500)
        self.assertEqual(tags.usage(), 800)
        self.assertEqual(tags.sleep({"cache": False, "weights": True, "unknown": True}), 800)
        self.assertEqual((model.held(), tags.asleep(), tags.usage()), (0, ["weights", "cache"], 800))
        with self.assertRaisesRegex(InvalidStateError, "'cache' sleeps: wake it"):
            with tags.use("cache"):
                pass
        self.assertEqual(tags.sleep({"cache": True, "weights": False}), 0, "given back twice")
        tags.wake(["weights"])
        self.assertEqual((model.contents["weights"], tags.asleep()), ("w" * 300, ["cache"]))
        tags.wake()
        tags.wake()
        self.assertEqual(model.contents["cache"], "?" * 500)

    def test_memory_that_is_short_leaves_all_asleep(self):
        model, tags = self.tags(weights=300, graphs=100, cache=500)
        tags.sleep({"weights": True, "graphs": True, "cache": False})
        model.limit = 600
        with self.assertRaisesRegex(MemoryError, "memory is short"):
            tags.wake()
        self.assertEqual((model.held(), tags.asleep()), (0, ["weights", "graphs", "cache"]))
        model.limit = 1000
        tags.wake()
        self.assertEqual([model.contents[t][:1] for t in tags.known()], ["w", "g", "?"])

    def test_host_memory_that_is_short_leaves_all_awake(self):
        model, tags = self.tags(cache=300, weights=300, more=300)
        model.host = 400
        with self.assertRaisesRegex(MemoryError, "host memory"):
            tags.sleep({"cache": False, "weights": True, "more": True})
        self.assertEqual(tags.asleep(), [])
        self.assertEqual([model.contents[t][0] for t in tags.known()], ["c", "w", "m"])

    def test_a_failure_at_each_call_loses_nothing(self):
        for seed in range(200):
            chance = random.Random(seed)
            model, tags = self.tags(a=1, b=2, c=3, d=4)
            for step in range(8):
                names = chance.sample("abcd", chance.randint(1, 4))
                before, contents = tags.asleep(), dict(model.contents)
                model.fails = model.calls + chance.randint(1, 6)
                sleeps = chance.random() < 0.5
                try:
                    tags.sleep({name: True for name in names}) if sleeps else tags.wake(names)
                except MemoryError:
                    self.assertEqual(tags.asleep(), before, (seed, step))
                else:
                    asleep = set(before) | set(names) if sleeps else set(before) - set(names)
                    self.assertEqual(set(tags.asleep()), asleep, (seed, step))
                self.assertEqual(set(model.kept), set(tags.asleep()))
                self.assertEqual(model.contents, contents)
        model.fails = None
        tags.wake()
        self.assertEqual(model.contents, {"a": "a", "b": "bb", "c": "ccc", "d": "dddd"})

    def test_a_failure_of_what_undoes_another_is_told_with_both(self):
        model, tags = self.tags(weights=300, cache=500)
        tags.sleep({"weights": True, "cache": True})
        model.limit, model.host = 600, 0
        with self.assertRaisesRegex(InvalidStateError, "memory is short; tag 'weights' stays as it is: host"):
            tags.wake()
        self.assertEqual(tags.asleep(), ["cache"])
        self.assertEqual(model.contents["weights"], "w" * 300)

    def test_tags_are_texts(self):
        _, tags = self.tags()
        for tag in ("", None, 3):
            with self.assertRaises(InvalidArgumentError):
                with tags.use(tag):
                    pass


class Interfaces(unittest.TestCase):
    """Calls as engines make them."""

    def setUp(self):
        self.model = Model()
        self.tags = _sleep.Tags(self.model)

    def same(self, ours, theirs):
        for name, member in vars(theirs).items():
            if name.startswith("_"):
                continue
            def parameters(of):
                return [(p.name, p.default) for p in inspect.signature(getattr(of, name)).parameters.values()]
            self.assertEqual(parameters(ours), parameters(theirs), name)
            self.assertEqual(isinstance(vars(ours)[name], classmethod), isinstance(member, classmethod), name)

    def test_signatures(self):
        self.same(_sleep.Backend, engine_types.SleepModeBackend)
        self.same(_sleep.Allocator, engine_types.MemAllocator)
        self.same(_sleep.MemorySaver, engine_types.TorchMemorySaver)

    def test_vllm(self):
        tags, model = self.tags, self.model
        backend = type("Backend", (_sleep.Backend,), {"tags": tags})()
        allocator = _sleep.Allocator(tags)
        with allocator.use_memory_pool(tag="weights"):
            model.put("weights", "w" * 300)
        with allocator.use_memory_pool(tag="kv_cache"):
            model.put("kv_cache", "k" * 500)
        self.assertEqual(allocator.get_current_usage(), 800)
        for _ in range(2):
            backend.suspend(level=1)
            self.assertEqual((backend.state(), model.held()), ("SUSPENDED", 0))
        backend.resume(tags=["weights"])
        self.assertEqual((backend.state(), model.contents["weights"]), ("SUSPENDED", "w" * 300))
        backend.resume(tags=["kv_cache", "scheduling"])
        self.assertEqual((backend.state(), model.contents["kv_cache"]), ("RUNNING", "?" * 500))
        backend.suspend(2)
        model.limit = 400
        with self.assertRaises(MemoryError):
            backend.resume()
        self.assertEqual((backend.state(), model.held()), ("SUSPENDED", 0))
        model.limit = 1000
        backend.resume()
        self.assertEqual(model.contents["weights"], "?" * 300)
        backend.discard(("kv_cache",))
        self.assertEqual((backend.state(), model.held()), ("SUSPENDED", 300))
        backend.resume(None)
        with self.assertRaisesRegex(InvalidArgumentError, "1 or 2"):
            backend.suspend(level=3)
        self.assertEqual((backend.preserves_communicators(), backend.supports_durable_storage()), (True, False))

    def test_vllm_state_within_a_resume(self):
        backend = type("Backend", (_sleep.Backend,), {"tags": self.tags})()
        with self.tags.use("weights"):
            pass
        backend.suspend()
        with mock.patch.object(self.model, "resume", side_effect=lambda name: seen.append(backend.state())):
            seen = []
            backend.resume()
        self.assertEqual(seen, ["RESUMING"])

    def test_vllm_registers_once_and_takes_our_allocator(self):
        modules = {
            "vllm": types.ModuleType("vllm"),
            "vllm.device_allocator": types.ModuleType("vllm.device_allocator"),
            "vllm.device_allocator.sleep_mode_backend": types.ModuleType("sleep_mode_backend"),
            "vllm.v1.worker.gpu_worker": types.ModuleType("gpu_worker"),
        }
        factory = type("SleepModeBackendFactory", (engine_types.Factory,), {"_registry": {}})
        modules["vllm"].device_allocator = modules["vllm.device_allocator"]
        modules["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory = factory
        ours = _sleep.Allocator(self.tags)
        with mock.patch.dict(sys.modules, modules):
            for _ in range(2):
                _sleep.register("leasehold", "leasehold.torch.sleep", ours)
        self.assertEqual(factory._registry, {"leasehold": ("leasehold.torch.sleep", "Backend")})
        for name in ("vllm.device_allocator", "vllm.v1.worker.gpu_worker"):
            self.assertIs(modules[name].get_mem_allocator_instance(), ours)

    def test_memory_saver(self):
        saver, model, graph = _sleep.MemorySaver(self.tags), self.model, []
        with saver.region("weights", enable_cpu_backup=True):
            model.put(model.inside[-1], "w" * 100)
            with saver.disable():
                self.assertEqual(model.inside[-1], "")
        with saver.region("weights"):
            model.put(model.inside[-1], "v" * 50)
        with saver.cuda_graph(graph, stream="s", tag="graphs"):
            model.put(model.inside[-1], "g" * 10)
        self.assertEqual(graph, [("dropped/graphs", {"stream": "s", "capture_error_mode": "global"})])
        for _ in range(2):
            saver.pause("weights")
            self.assertEqual(model.held(), 10)
        saver.pause()
        self.assertEqual(model.held(), 0)
        saver.resume("weights")
        saver.resume()
        self.assertEqual(sorted(c[:1] for c in model.contents.values() if c), ["?", "?", "w"])
        with self.assertRaisesRegex(InvalidArgumentError, "no memory has the tag 'others'"):
            saver.pause("others")
        with self.assertRaisesRegex(InvalidArgumentError, "leave pool out"):
            saver.cuda_graph(graph, pool=(0, 1))
        with saver.configure_subprocess():
            self.assertTrue(saver.enabled)


class Extension(Simulated):
    """The same over the extension's regions, on a simulated device."""

    def test_cycles_give_all_memory_back_and_do_not_grow(self):
        extension, t = self.extension, self.t
        regions, ids = {}, {}

        class Regions:
            @contextlib.contextmanager
            def use(self, name):
                if name not in regions:
                    regions[name], ids[name] = extension.Region("sleep/" + name, 0), (0, 900 + len(ids))
                    t.region_pool(regions[name], ids[name])
                t.begin_pool(ids[name], 0)
                yield
                t.end_pool(ids[name])

            def suspend(self, name, keep):
                return regions[name].suspend(keep)

            def resume(self, name):
                regions[name].resume()

        tags, blocks = _sleep.Tags(Regions()), []
        for tag, size in (("weights", 12 * MIB), ("kv_cache", 20 * MIB)):
            with tags.use(tag):
                blocks.append(t.raw_alloc(size, 0))
        reserved = self.reserved()
        for cycle in range(20):
            freed = tags.sleep({"weights": True, "kv_cache": False})
            self.assertGreaterEqual(freed, 32 * MIB)
            self.assertEqual(self.reserved(), reserved - freed)
            # Room for one of them alone: neither wakes.
            guest = t.raw_alloc(40 * MIB, 0)
            with self.assertRaisesRegex(RuntimeError, "out of memory"):
                tags.wake()
            self.assertEqual(tags.asleep(), ["weights", "kv_cache"])
            t.raw_delete(guest)
            t.empty_cache()
            tags.wake()
            self.assertEqual(self.reserved(), reserved)
        for block in blocks:
            t.raw_delete(block)
        for pool in ids.values():
            t.release_pool(pool)
            t.release_pool(pool)
        tags.sleep({"weights": False, "kv_cache": False})


if __name__ == "__main__":
    unittest.main()
