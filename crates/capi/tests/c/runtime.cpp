/* The header leasehold.hpp, used rightly and wrongly. Prints "ok", or what is wrong, with status 1.
 *
 *     runtime [cpu:0 | sim-cuda:0]
 */
#include "leasehold.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <unistd.h>

#define THAT(condition)                                                                                                                          \
    do {                                                                                                                                         \
        if (!(condition)) {                                                                                                                      \
            std::fprintf(stderr, "line %d: not so: %s: %s\n", __LINE__, #condition, leasehold_last_error());                                     \
            std::exit(1);                                                                                                                        \
        }                                                                                                                                        \
    } while (0)

/* The status that a call throws; LEASEHOLD_OK for none. */
template <class Call> static int thrown(Call &&call) {
    try {
        call();
        return LEASEHOLD_OK;
    } catch (const leasehold::error &error) {
        THAT(error.what()[0] != '\0');
        return error.status();
    }
}

/* Counts its copies. */
struct counted {
    static std::atomic<int> alive;
    counted() { alive++; }
    counted(const counted &) { alive++; }
    counted(counted &&) noexcept { alive++; }
    counted &operator=(const counted &) = default;
    ~counted() { alive--; }
};
std::atomic<int> counted::alive{0};

extern "C" {
static void scale(const leasehold_tile *tile) {
    float factor, *x = reinterpret_cast<float *>(static_cast<std::uintptr_t>(tile->bindings[0].address));
    std::memcpy(&factor, tile->params, sizeof factor);
    for (std::uint32_t i = 0; i < 4; i++) {
        x[tile->tile[0] * 4 + i] *= factor;
    }
}
}

static leasehold::kernel scaled(std::atomic<int> &asked) {
    counted c;
    return leasehold::kernel::builder("scale")
        .c_function(scale)
        .cuda_c("extern \"C\" __global__ void scale(float *x, float a) { for (int i = 0; i < 4; i++) x[blockIdx.x * 4 + i] *= a; }")
        .read_writes()
        .params<float>()
        .aligned(4)
        .check([&asked, c](const leasehold_launch_info &launch) {
            asked++;
            if (launch.blocks[0] == 77) {
                throw std::runtime_error("on purpose");
            }
            return launch.blocks[1] == 1 && launch.blocks[2] == 1 && launch.threads[0] == 1 && launch.binding_bytes[0] >= launch.blocks[0] * 16ull;
        })
        .define();
}

static void work(const leasehold::runtime &runtime, bool cpu) {
    std::atomic<int> asked{0}, called{0};
    const leasehold::stream stream = runtime.default_stream();
    const leasehold::kernel kernel = scaled(asked);
    kernel.prepare(runtime);
    leasehold::buffer x = stream.upload(std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
    x.set_name("x");
    runtime.trace_start();
    stream.launch(kernel, 2, {x.read_write()}, 2.0f);
    const char *folder = std::getenv("TMPDIR");
    const std::string file = std::string(folder == nullptr ? "." : folder) + "/leasehold-trace-" + std::to_string(getpid()) + ".json";
    runtime.trace_stop(file, std::chrono::seconds(10));
    THAT(std::remove(file.c_str()) == 0);
    THAT((stream.download<float>(x) == std::vector<float>{2, 4, 6, 8, 10, 12, 14, 16}));
    THAT((stream.download<float>(x.read(4, 8)) == std::vector<float>{4, 6}));
    THAT(thrown([&] { stream.launch(kernel, 3, {x.read_write()}, 2.0f); }) == LEASEHOLD_INVALID_ARGUMENT);
    THAT(thrown([&] { stream.launch(kernel, 77, {x.read_write()}, 2.0f); }) == LEASEHOLD_INVALID_ARGUMENT);
    THAT(thrown([&] { stream.launch(kernel, 2, {x.read_write()}, 2.0); }) == LEASEHOLD_INVALID_ARGUMENT);
    THAT(thrown([&] { stream.download<float>(x.read(0, 100)); }) == LEASEHOLD_INVALID_ARGUMENT);
    THAT(asked == 3);

    /* Copies hold, moves take along. */
    leasehold::buffer copy = x, moved = std::move(copy);
    THAT(!copy && moved && moved.get() == x.get());
    const leasehold::buffer other = stream.alloc(32);
    stream.copy(other, x);
    x = leasehold::buffer();
    THAT(stream.download<float>(moved)[0] == 2.0f && other.size() == 32);
    copy = moved;
    THAT(copy.get() == moved.get());
    THAT(thrown([] { leasehold::buffer(0).size(); }) == LEASEHOLD_INVALID_ARGUMENT);

    stream.fill(other, 1.5f);
    stream.fill(other.write(0, 8), std::uint8_t(0));
    THAT((stream.download<float>(other.read(4, 8)) == std::vector<float>{0, 1.5f}));
    stream.copy_rows(other.write(), moved.read(), leasehold_rows{4, 2, 8, 16});
    THAT(stream.download<float>(other)[2] == 10.0f);
    const leasehold::buffer pinned = stream.alloc_pinned(32);
    stream.copy(pinned, moved);
    stream.synchronize();
    THAT(static_cast<float *>(pinned.address())[7] == 16.0f);
    if (cpu) {
        static float memory[8];
        std::atomic<int> done{0};
        {
            const leasehold::buffer wrapped = runtime.wrap(memory, sizeof memory, [&done, c = counted()] { done++; });
            stream.copy(wrapped, moved);
        }
        runtime.synchronize();
        THAT(done == 1 && memory[7] == 16.0f);
    }

    /* Events, points, calls. */
    const leasehold::event start = runtime.create_event(), end = runtime.create_event();
    const leasehold::stream second = runtime.create_stream("second", 1);
    second.record(start);
    const leasehold::point p = second.host_call([&called, c = counted()] { called++; });
    second.record(end);
    stream.wait(end);
    stream.wait(p);
    runtime.wait_all({p, stream.now()}, std::chrono::seconds(60));
    THAT(called == 1 && runtime.wait_any({p}) == 0);
    THAT(end.elapsed_since(start).count() >= 0 && end.query() && end.last().timeline == p.timeline);
    end.synchronize(std::chrono::seconds(60));
    std::atomic<int> completed{-1};
    second.on_complete([&completed, c = counted()](int status) { completed = status; });
    second.synchronize();
    THAT(completed == LEASEHOLD_OK && second.query());
    second.flush();
    second.native();
    second.set_name("another name");
    if (runtime.describe().features & LEASEHOLD_FEATURE_FOREIGN_CALLS) {
        second.foreign_call({moved.read()}, [&called](std::uintptr_t, const leasehold_binding *bindings, std::size_t count) {
            called += static_cast<int>(count) + (bindings[0].bytes == 32);
        });
        second.synchronize();
        THAT(called == 3);
    }
    second.host_call([] { throw std::runtime_error("on purpose"); });
    THAT(thrown([&] { second.synchronize(); }) == LEASEHOLD_FAILED);

    /* A kernel that waits itself reads early what its graph does not write; clusters and a cooperative launch are CUDA's. */
    if (cpu) {
        THAT(thrown([&] { kernel.resident_blocks(runtime, 64); }) == LEASEHOLD_UNSUPPORTED);
        const leasehold::kernel crew = leasehold::kernel::builder("crew").c_function(scale).read_writes().params<float>().cluster({2, 1, 1}).cooperative().define();
        THAT(thrown([&] { crew.prepare(runtime); }) == LEASEHOLD_UNSUPPORTED);
    } else {
        THAT(kernel.resident_blocks(runtime, 64) > 0);
        const leasehold::kernel early = leasehold::kernel::builder("early")
                                            .cuda_c("extern \"C\" __global__ void early(const float *x, float *y, float a, unsigned early) {"
                                                    " asm volatile(\"griddepcontrol.wait;\" ::: \"memory\"); *y = a * *x + early; }")
                                            .reads()
                                            .writes()
                                            .params<float>()
                                            .dependent_launch({0})
                                            .define();
        const leasehold::buffer from = stream.upload(std::vector<float>{2}), to = stream.upload(std::vector<float>{0});
        stream.launch(early, 1, {from.read(), to.write()}, 3.0f);
        THAT(stream.download<float>(to)[0] == 6.0f);
        const leasehold::graph granted =
            runtime.record([&](const leasehold::stream &recorded) { recorded.launch(early, 1, {from.read(), to.write()}, 3.0f); });
        granted.launch(stream);
        THAT(stream.download<float>(to)[0] == 7.0f);
        const leasehold::graph writes = runtime.record([&](const leasehold::stream &recorded) {
            recorded.fill(from, 4.0f);
            recorded.launch(early, 1, {from.read(), to.write()}, 3.0f);
        });
        writes.launch(stream);
        THAT(stream.download<float>(to)[0] == 12.0f);
    }

    /* A graph, and a recording that fails. */
    const leasehold::buffer y = stream.upload(std::vector<float>{1, 1, 1, 1});
    std::uint32_t node = 99;
    const leasehold::graph graph = runtime.record([&](const leasehold::stream &recorded) {
        const leasehold::buffer scratch = recorded.alloc(16);
        recorded.copy(scratch, y);
        node = recorded.next_node();
        recorded.launch(kernel, 1, {scratch.read_write()}, 3.0f);
        recorded.copy(y, scratch);
        recorded.host_call([c = counted()] {});
    });
    graph.launch(stream);
    THAT(stream.download<float>(y)[3] == 3.0f && node == 1);
    const float five = 5.0f;
    graph.update({leasehold::graph::params(node, five)});
    graph.launch(stream);
    THAT(stream.download<float>(y)[0] == 15.0f && graph.describe().launches == 2 && graph.nodes()[0] == '[');
    const leasehold::buffer z = stream.upload(std::vector<float>{2, 2, 2, 2});
    graph.update({leasehold::graph::replace(y, z)});
    graph.launch(stream);
    THAT(stream.download<float>(z)[0] == 10.0f && stream.download<float>(y)[0] == 15.0f);
    THAT(thrown([&] {
             runtime.record([&](const leasehold::stream &recorded) {
                 recorded.host_call([c = counted()] {});
                 recorded.synchronize();
             });
         }) == LEASEHOLD_INVALID_STATE);
    bool passed = false;
    try {
        runtime.record([](const leasehold::stream &) { throw 7; });
    } catch (int) {
        passed = true;
    }
    THAT(passed);

    /* A host timeline, signalled by another thread. */
    const leasehold::host_timeline timeline = runtime.create_host_timeline();
    const leasehold::stream third = runtime.create_stream();
    const leasehold::point go = timeline.next();
    third.wait(go);
    const leasehold::point filled = third.fill(z, 4.0f);
    THAT(thrown([&] { third.synchronize(std::chrono::milliseconds(1)); }) == LEASEHOLD_TIMEOUT);
    std::thread signals([&] { timeline.signal(go.value); });
    runtime.wait_all({filled});
    signals.join();
    timeline.fail("on purpose");
    THAT(thrown([&] { leasehold::check(leasehold_stream_wait_point(third.get(), timeline.next())); third.synchronize(); }) != LEASEHOLD_OK);
}

/* The text that a call throws; nothing for none. */
template <class Call> static std::string said(Call &&call) {
    try {
        call();
        return "";
    } catch (const leasehold::error &error) {
        return error.what();
    }
}

/* A failure stays with its stream: who would read what it was to write is refused, and goes on. */
static void failures(const leasehold::runtime &runtime) {
    const leasehold::stream bad = runtime.create_stream("bad"), good = runtime.create_stream("good"), third = runtime.create_stream();
    const leasehold::buffer b = bad.alloc(16), c = good.alloc(16);
    good.fill(c, 1);
    bad.foreign_call({b.write()}, [](std::uintptr_t, const leasehold_binding *, std::size_t) { throw 1; });
    THAT(thrown([&] { bad.synchronize(); }) == LEASEHOLD_FAILED);
    THAT(thrown([&] { good.copy(c, b); }) == LEASEHOLD_FAILED);
    THAT(thrown([&] { good.download<int>(b); }) == LEASEHOLD_FAILED);
    good.fill(c, 2);
    THAT(good.download<int>(c)[3] == 2);
    third.fill(b, 3);
    third.copy(c, b);
    THAT(third.download<int>(c)[0] == 3);
}

/* A library's call in a graph: with CUDA it is captured once, and on the CPU each launch calls it. */
static void library_calls(const leasehold::runtime &runtime, bool cpu) {
    std::atomic<int> times{0};
    const leasehold::stream stream = runtime.create_stream();
    const leasehold::buffer x = stream.upload(std::vector<float>{1, 2});
    const leasehold::graph graph = runtime.record([&](const leasehold::stream &recorded) {
        recorded.foreign_call({x.read_write()}, [&times](std::uintptr_t native, const leasehold_binding *bindings, std::size_t count) {
            times += count == 1 && bindings[0].bytes == 8;
            if (native == 0) {
                *reinterpret_cast<float *>(static_cast<std::uintptr_t>(bindings[0].address)) += 1;
            }
        });
    });
    for (int launch = 0; launch < 3; launch++) {
        graph.launch(stream);
    }
    THAT(stream.download<float>(x)[0] == (cpu ? 4.0f : 1.0f) && times == (cpu ? 3 : 1));
}

/* The device has no room twice: the report names who has it, and what to do. */
static void no_room(const leasehold::runtime &runtime) {
    const leasehold::stream stream = runtime.create_stream();
    leasehold::buffer weights = stream.alloc(600ull << 20);
    weights.set_name("weights");
    const std::string report = said([&] { stream.alloc(600ull << 20); });
    for (const char *part : {"600.0 MiB live with name \"weights\"", "the driver has no room", "free something, ask for less"}) {
        THAT(report.find(part) != std::string::npos);
    }
    weights = leasehold::buffer();
    THAT(thrown([&] { stream.alloc(600ull << 20); }) == LEASEHOLD_OK);
}

/* A rank that is alone: sums are its own numbers. */
static void ranks(const leasehold::runtime &runtime) {
    using namespace leasehold::collective;
    std::vector<leasehold::world> worlds = leasehold::world::threads(1);
    leasehold::world world = worlds.at(0);
    THAT(world.describe().ranks == 1 && !world.report(std::chrono::seconds(1)).empty());
    const leasehold::comm comm = world.create_comm(runtime, "alone", std::chrono::seconds(30)), rest = comm.shrink({7});
    THAT(comm.describe().rank == 0 && rest.describe().ranks == 1 && !comm.split(LEASEHOLD_NO_COLOR));
    const leasehold::stream stream = runtime.create_stream();
    const leasehold::buffer x = stream.upload(std::vector<std::int16_t>{1, -2, 3}), y = stream.alloc(6);
    comm.call(stream, {all_reduce<std::int16_t>(x), all_gather<std::int16_t>(y.write(), y.read())});
    comm.call(stream, {all_gather<std::int16_t>(y.write(), x.read())});
    comm.call(stream, {reduce_scatter<std::int16_t>(y.write(), x.read(), LEASEHOLD_LARGEST)});
    comm.call(stream, {all_to_all<std::int16_t>(y.write(), x.read()), barrier()});
    comm.call(stream, {broadcast<std::int16_t>(y, 0)});
    comm.call(stream, {reduce<std::int16_t>(y, 0)});
    THAT((stream.download<std::int16_t>(y) == std::vector<std::int16_t>{1, -2, 3}));
    THAT(thrown([&] { comm.call(stream, {send<float>(x.read(0, 4), 0)}); }) == LEASEHOLD_INVALID_ARGUMENT);
    THAT(thrown([&] { comm.call(stream, {recv<double>(x.write(), 1)}); }) == LEASEHOLD_INVALID_ARGUMENT);
    static_assert(leasehold::element_of<unsigned char>() == LEASEHOLD_U8 && leasehold::element_of<double>() == LEASEHOLD_F64, "the types' numbers");
    rest.abort("of a test");
    THAT(rest.failure() == LEASEHOLD_FAILED && comm.failure() == LEASEHOLD_OK);
    world.close(std::chrono::seconds(30));
    THAT(!world && thrown([] { leasehold::world::threads(0); }) == LEASEHOLD_INVALID_ARGUMENT);
}

int main(int argc, char **argv) {
    const std::string name = argc > 1 ? argv[1] : "cpu:0";
    THAT(thrown([] { leasehold::device("nothing:0"); }) != LEASEHOLD_OK);
    {
        const leasehold::device device(name);
        leasehold::runtime runtime(device);
        work(runtime, name == "cpu:0");
        if (runtime.describe().features & LEASEHOLD_FEATURE_FOREIGN_CALLS) {
            failures(runtime);
            library_calls(runtime, name == "cpu:0");
        }
        if (name == "sim-cuda:0") {
            no_room(runtime);
        }
        ranks(runtime);
        runtime.synchronize();
        while (counted::alive != 0) {
            runtime.synchronize();
        }
        THAT(runtime.describe().allocated_bytes == 0);
        runtime.close(std::chrono::seconds(60));
    }
#ifdef LEASEHOLD_SIM
    if (name != "cpu:0") {
        char *races;
        leasehold::check(leasehold_sim_races(&races));
        THAT(*races == '\0');
        leasehold_text_free(races);
    }
#endif
    std::printf("ok\n");
    return 0;
}
