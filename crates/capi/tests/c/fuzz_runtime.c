/* Random calls of leasehold_runtime.h by threads that share all objects.
 *
 *     fuzz_runtime [CALLS [THREADS [SEED [DEVICE]]]]
 *
 * Handles are live, stale, of another kind, and forged; objects are released while other threads use them; recordings are dropped, ended and
 * given up, also by other threads; streams and host timelines fail. No call may crash, hang, or report a defect of the library. At the end
 * all is released, and no memory is left. Prints "ok" and numbers, or what is wrong, with status 1.
 */
#define _GNU_SOURCE
#include "leasehold_runtime.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LEASEHOLD_SIM
#include "races.h"
#endif

enum { STREAM, BUFFER, EVENT, KERNEL, GRAPH, TIMELINE, RECORDED, WORLD, COMM, RUNTIME, KINDS };
enum { SLOTS = 24, MOST_THREADS = 64, BYTES = 4096, STATUSES = LEASEHOLD_MISMATCH + 1 };

static atomic_ullong slots[KINDS][SLOTS], calls, statuses[STATUSES], contexts, wrong;
static uint64_t budget_of_calls;
static leasehold_device device;
static leasehold_runtime first;
static int on_cpu; /* where the host's memory is the device's */

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 11;
}

static int note(int status, const char *what) {
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    if (status >= 0 && status < STATUSES) {
        atomic_fetch_add_explicit(&statuses[status], 1, memory_order_relaxed);
    }
    if (status == LEASEHOLD_INTERNAL || status < 0 || status >= STATUSES) {
        char text[600];
        leasehold_error_text(text, sizeof text);
        fprintf(stderr, "%s: %d: %s\n", what, status, text);
        wrong++;
    }
    return status;
}

#define CALL(function, ...) note(leasehold_##function(__VA_ARGS__), #function)

static int drop(int kind, uint64_t handle) {
    switch (kind) {
    case BUFFER:
        return CALL(buffer_release, handle);
    case EVENT:
        return CALL(event_release, handle);
    case KERNEL:
        return CALL(kernel_release, handle);
    case GRAPH:
        return CALL(graph_release, handle);
    case TIMELINE:
        return CALL(host_timeline_release, handle);
    case WORLD:
        return CALL(world_release, handle);
    case COMM:
        return CALL(comm_release, handle);
    case RUNTIME:
        /* Longer than a loaded machine needs: a runtime that stays open keeps the device. */
        return CALL(runtime_close, handle, 120000000000);
    default:
        return CALL(stream_release, handle);
    }
}

static int keep(int kind, uint64_t handle) {
    switch (kind) {
    case BUFFER:
        return CALL(buffer_retain, handle);
    case EVENT:
        return CALL(event_retain, handle);
    case KERNEL:
        return CALL(kernel_retain, handle);
    case GRAPH:
        return CALL(graph_retain, handle);
    case TIMELINE:
        return CALL(host_timeline_retain, handle);
    case WORLD:
        return CALL(world_retain, handle);
    case COMM:
        return CALL(comm_retain, handle);
    case RUNTIME:
        return LEASEHOLD_INVALID_ARGUMENT;
    default:
        return CALL(stream_retain, handle);
    }
}

/* Puts a new object in a place, and releases the one that was there. */
static void put(int kind, uint64_t handle, uint64_t *state) {
    uint64_t old = atomic_exchange(&slots[kind][next(state) % SLOTS], handle);
    if (old != 0) {
        drop(kind, old);
    }
}

static uint64_t pick(int kind, uint64_t *state) {
    uint64_t what = next(state), found = atomic_load(&slots[kind][next(state) % SLOTS]);
    if (what % 64 == 0) {
        return found ^ (uint64_t)1 << next(state) % 64;
    }
    if (what % 64 == 1) {
        return atomic_load(&slots[next(state) % KINDS][next(state) % SLOTS]);
    }
    return what % 256 == 2 ? next(state) << 32 ^ next(state) : found;
}

static leasehold_operand part(uint64_t *state) {
    leasehold_operand operand;
    memset(&operand, 0, sizeof operand);
    operand.buffer = pick(BUFFER, state);
    operand.offset = next(state) % 8 == 0 ? next(state) % BYTES : 0;
    operand.bytes = next(state) % 4 == 0 ? LEASEHOLD_WHOLE : next(state) % 8 == 0 ? next(state) % (2 * BYTES) : 1024;
    operand.access = next(state) % 8 == 0 ? (uint32_t)(next(state) % 5) : 0;
    return operand;
}

static void tile(const leasehold_tile *at) {
    uint8_t *to = (uint8_t *)(uintptr_t)at->bindings[1].address;
    const uint8_t *from = (const uint8_t *)(uintptr_t)at->bindings[0].address;
    uint32_t i;
    for (i = 0; i < 64; i++) {
        to[at->tile[0] * 64 + i] = (uint8_t)(from[at->tile[0] * 64 + i] + 1);
    }
}

static const char cuda[] = "extern \"C\" __global__ void add(const unsigned char *x, unsigned char *y) {\n"
                           "    for (int i = 0; i < 64; i++) y[blockIdx.x * 64 + i] = x[blockIdx.x * 64 + i] + 1;\n"
                           "}\n";

static int check(void *context, const leasehold_launch_info *launch) {
    leasehold_graph_info info = {.size = sizeof info};
    (void)context;
    CALL(graph_describe, atomic_load(&slots[GRAPH][launch->blocks[0] % SLOTS]), &info);
    return launch->blocks[1] != 1 || launch->blocks[2] != 1 || launch->threads[0] != 1 || launch->threads[1] != 1 || launch->threads[2] != 1 ||
           launch->binding_bytes[0] < launch->blocks[0] * 64ull || launch->binding_bytes[1] < launch->blocks[0] * 64ull;
}

static void release(void *context) {
    (void)context;
    atomic_fetch_sub(&contexts, 1);
}

/* Memory of the caller's ends with its buffer, and not before. */
static void free_memory(void *memory) {
    free(memory);
    atomic_fetch_sub(&contexts, 1);
}

static int wrap(leasehold_runtime runtime, uint64_t *made) {
    leasehold_wrap_desc desc = {sizeof desc, 0, BYTES, 0, 0, 0, free_memory, NULL};
    void *memory = calloc(1, BYTES);
    desc.address = (uintptr_t)memory;
    desc.context = memory;
    atomic_fetch_add(&contexts, 1);
    if (CALL(buffer_wrap, runtime, &desc, made) != LEASEHOLD_OK) {
        free_memory(memory);
        return LEASEHOLD_INVALID_ARGUMENT;
    }
    return LEASEHOLD_OK;
}

static int host(void *context) {
    uint64_t state = (uint64_t)(uintptr_t)context | 1;
    leasehold_point point;
    CALL(stream_now, pick(STREAM, &state), &point);
    CALL(stream_fill, pick(STREAM, &state), part(&state), 3, 1, NULL);
    CALL(stream_synchronize, pick(STREAM, &state), 0);
    return next(&state) % 50 == 0;
}

static int foreign(void *context, uintptr_t native, const leasehold_binding *bindings, size_t count) {
    (void)native, (void)bindings, (void)context;
    return count != 1;
}

static void complete(void *context, int status) {
    (void)context;
    note(status, "completion");
}

static void launch_some(leasehold_stream on, uint64_t *state) {
    leasehold_operand operands[2] = {part(state), part(state)};
    leasehold_grid grid = {{(uint32_t)(next(state) % 20), 1, 1}, {1, 1, 1}, 0, 0};
    leasehold_launch launches[2];
    leasehold_point point;
    operands[0].access = LEASEHOLD_READ;
    operands[1].access = LEASEHOLD_READ_WRITE;
    if (next(state) % 16 == 0) {
        grid.blocks[next(state) % 3] = (uint32_t)next(state);
    }
    if (next(state) % 2 == 0) {
        CALL(stream_launch, on, pick(KERNEL, state), &grid, operands, 2, NULL, 0, &point);
        return;
    }
    launches[0].kernel = pick(KERNEL, state);
    launches[0].grid = grid;
    launches[0].operands = operands;
    launches[0].operand_count = 2;
    launches[0].params = NULL;
    launches[0].params_bytes = 0;
    launches[1] = launches[0];
    CALL(stream_launch_many, on, launches, next(state) % 3, &point);
}

/* Calls of a rank that is alone: of any kind, with memory that fits or not. */
static void call_ranks(leasehold_stream on, uint64_t *state) {
    leasehold_collective all[2];
    int i;
    memset(all, 0, sizeof all);
    for (i = 0; i < 2; i++) {
        all[i].call = (uint32_t)(next(state) % 10 + (next(state) % 32 == 0));
        all[i].element = (uint32_t)(next(state) % 13 + (next(state) % 32 == 0));
        all[i].reduce = all[i].call % 2 == 1 && all[i].call < 6 ? (uint32_t)(next(state) % 6) : 0;
        all[i].rank = next(state) % 16 == 0;
        if (next(state) % 8 != 0) {
            all[i].to = part(state);
        }
        if (next(state) % 2 == 0) {
            all[i].from = part(state);
        }
    }
    CALL(comm_call, pick(COMM, state), on, all, next(state) % 3, NULL);
}

/* One operation of a stream, live or recorded. */
static void operate(leasehold_stream on, uint64_t *state) {
    static const leasehold_rows rows = {16, 8, 32, 64};
    char bytes[1024];
    leasehold_operand operand = part(state);
    leasehold_point point;
    memset(bytes, 1, sizeof bytes);
    switch (next(state) % 13) {
    case 0:
        CALL(stream_copy, on, operand, part(state), &point);
        break;
    case 1:
        CALL(stream_copy_rows, on, operand, part(state), &rows, &point);
        break;
    case 2:
    case 3:
        CALL(stream_fill, on, operand, (uint32_t)(next(state) % 256), 1u << next(state) % 3, &point);
        break;
    case 4:
        CALL(stream_upload, on, operand, bytes, sizeof bytes, &point);
        break;
    case 5:
        CALL(stream_wait_event, on, pick(EVENT, state));
        break;
    case 6:
        CALL(event_record, pick(EVENT, state), on, &point);
        break;
    case 7:
        atomic_fetch_add(&contexts, 1);
        if (CALL(stream_host_call, on, host, release, (void *)(uintptr_t)next(state), &point) != LEASEHOLD_OK) {
            atomic_fetch_sub(&contexts, 1);
        }
        break;
    case 8:
        operand.access = LEASEHOLD_READ;
        atomic_fetch_add(&contexts, 1);
        if (CALL(stream_foreign_call, on, &operand, 1, foreign, release, NULL, &point) != LEASEHOLD_OK) {
            atomic_fetch_sub(&contexts, 1);
        }
        break;
    case 9:
        call_ranks(on, state);
        break;
    default:
        launch_some(on, state);
        break;
    }
}

static void make(int kind, uint64_t *state) {
    static const uint32_t access[] = {LEASEHOLD_READ, LEASEHOLD_READ_WRITE};
    leasehold_runtime runtime = next(state) % 8 == 0 ? pick(RUNTIME, state) : first;
    uint64_t made = 0;
    int status = LEASEHOLD_INVALID_ARGUMENT;
    switch (kind) {
    case STREAM: {
        leasehold_stream_options options = {sizeof options, "a stream", (int)(next(state) % 3) - 1, 0};
        status = CALL(stream_create, runtime, next(state) % 2 ? &options : NULL, &made);
        break;
    }
    case BUFFER:
        if (on_cpu && next(state) % 4 == 0) {
            status = wrap(runtime, &made);
            break;
        }
        status = next(state) % 8 == 0 ? CALL(buffer_alloc_pinned, pick(STREAM, state), BYTES, &made)
                                      : CALL(buffer_alloc, pick(STREAM, state), BYTES, &made);
        break;
    case EVENT:
        status = CALL(event_create, runtime, (uint32_t)(next(state) % 4), &made);
        break;
    case KERNEL: {
        leasehold_kernel_source sources[2];
        leasehold_kernel_desc desc = {sizeof desc, "add", sources, 2, access, 2, 0, 0, LEASEHOLD_OVERLAP_REFUSED, 0, check, release, NULL, NULL, 0, {0, 0, 0}, 0};
        memset(sources, 0, sizeof sources);
        sources[0].kind = LEASEHOLD_SOURCE_C_FUNCTION;
        sources[0].function = tile;
        sources[1].kind = LEASEHOLD_SOURCE_CUDA_C;
        sources[1].code = cuda;
        atomic_fetch_add(&contexts, 1);
        status = CALL(kernel_define, &desc, &made);
        if (status != LEASEHOLD_OK) {
            atomic_fetch_sub(&contexts, 1);
        }
        break;
    }
    case GRAPH: {
        leasehold_stream recorded = 0;
        int i, steps = (int)(next(state) % 6);
        if (CALL(record_begin, runtime, &recorded) != LEASEHOLD_OK) {
            return;
        }
        for (i = 0; i < steps; i++) {
            leasehold_buffer temporary;
            if (next(state) % 8 == 0 && CALL(buffer_alloc, recorded, BYTES, &temporary) == LEASEHOLD_OK) {
                put(BUFFER, temporary, state);
            }
            operate(recorded, state);
        }
        status = next(state) % 8 == 0 ? CALL(record_cancel, recorded) | 1 : CALL(record_end, recorded, &made);
        if (next(state) % 4 == 0) {
            put(RECORDED, recorded, state);
        } else {
            drop(RECORDED, recorded);
        }
        break;
    }
    case TIMELINE:
        status = CALL(host_timeline_create, runtime, &made);
        break;
    case RECORDED:
        status = CALL(record_begin, runtime, &made);
        break;
    case WORLD:
        status = next(state) % 8 == 0 ? CALL(world_open, &made) : CALL(world_open_threads, 1, &made);
        break;
    case COMM: {
        leasehold_comm_desc desc = {sizeof desc, next(state) % 16 == 0 ? "a/b" : NULL, 1000000000, (uint32_t)(next(state) % 9), 0};
        status = CALL(comm_create, pick(WORLD, state), runtime, &desc, &made);
        break;
    }
    default:
        status = CALL(runtime_open, device, &made);
        break;
    }
    if (status == LEASEHOLD_OK) {
        put(kind, made, state);
    }
}

static void wait_for_host(uint64_t *state) {
    leasehold_host_timeline timeline = pick(TIMELINE, state);
    leasehold_stream stream = pick(STREAM, state);
    leasehold_point point;
    if (CALL(host_timeline_next, timeline, &point) != LEASEHOLD_OK || CALL(host_timeline_retain, timeline) != LEASEHOLD_OK) {
        return;
    }
    CALL(stream_wait_point, stream, point);
    operate(stream, state);
    CALL(wait_all, first, &point, 1, 1000);
    if (next(state) % 64 == 0) {
        CALL(host_timeline_fail, timeline, "of a test");
    } else {
        CALL(host_timeline_signal, timeline, point.value);
    }
    CALL(host_timeline_release, timeline);
}

static void ask(uint64_t *state) {
    leasehold_runtime_info runtime_info = {.size = sizeof runtime_info};
    leasehold_buffer_info buffer_info = {.size = sizeof buffer_info};
    leasehold_graph_info graph_info = {.size = 8 + next(state) % sizeof graph_info};
    leasehold_world_info world_info = {.size = sizeof world_info};
    leasehold_comm_info comm_info = {.size = sizeof comm_info};
    leasehold_point points[3] = {{0, 0}, {0, 0}, {0, 0}};
    char bytes[1024], *text;
    uint64_t number;
    uint32_t node;
    uintptr_t native;
    size_t which;
    int answer;
    leasehold_stream stream = pick(next(state) % 8 == 0 ? RECORDED : STREAM, state);
    switch (next(state) % 17) {
    case 0:
        CALL(runtime_describe, pick(RUNTIME, state), &runtime_info);
        break;
    case 1:
        CALL(buffer_describe, pick(BUFFER, state), &buffer_info);
        CALL(buffer_set_name, pick(BUFFER, state), "a name");
        break;
    case 2:
        CALL(graph_describe, pick(GRAPH, state), &graph_info);
        if (CALL(graph_nodes, pick(GRAPH, state), &text) == LEASEHOLD_OK) {
            leasehold_text_free(text);
        }
        break;
    case 3:
        CALL(stream_wait_native, stream, next(state) % 2);
        CALL(stream_precede_native, stream, next(state) % 2);
        CALL(stream_query, stream, &answer);
        CALL(stream_failure, stream, &answer);
        CALL(stream_native, stream, &native);
        break;
    case 4:
        CALL(stream_synchronize, stream, next(state) % 1000000);
        CALL(stream_flush, stream);
        break;
    case 5:
        CALL(event_query, pick(EVENT, state), &answer);
        CALL(event_synchronize, pick(EVENT, state), next(state) % 1000000);
        break;
    case 6:
        CALL(event_point, pick(EVENT, state), &points[0]);
        CALL(stream_wait_point, stream, points[0]);
        break;
    case 7:
        CALL(event_query, pick(EVENT, state), &answer);
        number = 0;
        CALL(event_elapsed_blocking, pick(EVENT, state), pick(EVENT, state), &number);
        break;
    case 8:
        CALL(stream_now, stream, &points[0]);
        points[1].timeline = next(state) % 4 == 0 ? next(state) : next(state) % 65536;
        points[1].value = next(state) % 2 == 0 ? next(state) : next(state) % 64;
        CALL(wait_all, first, points, next(state) % 4, next(state) % 100000);
        CALL(wait_any, first, points, next(state) % 4, next(state) % 100000, &which);
        CALL(stream_wait_point, stream, points[1]);
        break;
    case 9:
        CALL(record_next, stream, &node);
        CALL(stream_set_name, stream, "another name");
        break;
    case 10:
        CALL(stream_download_blocking, stream, bytes, sizeof bytes, part(state));
        break;
    case 11:
        CALL(stream_upload_blocking, stream, part(state), memset(bytes, 2, sizeof bytes), sizeof bytes);
        break;
    case 12:
        CALL(world_describe, pick(WORLD, state), &world_info);
        if (CALL(world_report, pick(WORLD, state), next(state) % 1000000, &text) == LEASEHOLD_OK) {
            leasehold_text_free(text);
        }
        if (next(state) % 8 == 0) {
            CALL(world_close, pick(WORLD, state), next(state) % 1000000);
        }
        break;
    case 13:
        CALL(comm_describe, pick(COMM, state), &comm_info);
        CALL(comm_failure, pick(COMM, state), &answer);
        if (next(state) % 4 == 0 && CALL(comm_split, pick(COMM, state), next(state) % 4 == 0 ? LEASEHOLD_NO_COLOR : 1, 0, &number) == LEASEHOLD_OK) {
            put(COMM, number, state);
        }
        if (next(state) % 8 == 0) {
            node = (uint32_t)(next(state) % 2);
            if (CALL(comm_shrink, pick(COMM, state), &node, 1, &number) == LEASEHOLD_OK) {
                put(COMM, number, state);
            }
            CALL(comm_abort, pick(COMM, state), "of a test");
        }
        break;
    case 14:
        CALL(kernel_prepare, pick(KERNEL, state), pick(RUNTIME, state));
        CALL(kernel_resident_blocks, pick(KERNEL, state), pick(RUNTIME, state), (uint32_t)next(state), (uint32_t)next(state), &number);
        CALL(stream_on_complete, stream, complete, NULL);
        break;
    case 15:
        if (next(state) % 4 == 0) {
            CALL(trace_start, pick(RUNTIME, state));
        } else {
            CALL(trace_stop, pick(RUNTIME, state), next(state) % 2 ? NULL : "/nowhere/trace.json", next(state) % 1000000);
        }
        break;
    default:
        CALL(runtime_synchronize, pick(RUNTIME, state), next(state) % 1000000);
        break;
    }
}

static void update(uint64_t *state) {
    leasehold_graph_change changes[2];
    int i, again;
    memset(changes, 0, sizeof changes);
    for (i = 0; i < 2; i++) {
        changes[i].kind = (uint32_t)(next(state) % 5);
        changes[i].node = (uint32_t)(next(state) % 8);
        changes[i].grid[0] = (uint32_t)(next(state) % 20);
        changes[i].grid[1] = changes[i].grid[2] = 1;
        changes[i].from = pick(BUFFER, state);
        changes[i].to = pick(BUFFER, state);
    }
    CALL(graph_update, pick(GRAPH, state), changes, next(state) % 3, &again);
}

static void *work(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument * 0x9e3779b97f4a7c15u + 1;
    while (atomic_load_explicit(&calls, memory_order_relaxed) < budget_of_calls && wrong == 0) {
        uint64_t what = next(&state) % 100;
        int kind = (int)(next(&state) % RUNTIME);
        if (what < 45) {
            operate(pick(STREAM, &state), &state);
        } else if (what < 60) {
            CALL(graph_launch, pick(GRAPH, &state), pick(STREAM, &state), NULL);
        } else if (what < 72) {
            ask(&state);
        } else if (what < 76) {
            update(&state);
        } else if (what < 82) {
            uint64_t handle = pick(kind, &state);
            if (keep(kind, handle) == LEASEHOLD_OK) {
                drop(kind, handle);
            }
        } else if (what < 83) {
            /* Of a live object: who has its handle finds it stale. */
            drop(kind, pick(kind, &state));
        } else if (what < 86) {
            wait_for_host(&state);
        } else if (what < 87) {
            leasehold_graph made;
            if (CALL(record_end, pick(RECORDED, &state), &made) == LEASEHOLD_OK) {
                put(GRAPH, made, &state);
            }
            CALL(record_cancel, pick(RECORDED, &state));
            operate(pick(RECORDED, &state), &state);
        } else {
            make((int)(next(&state) % 64 == 0 ? RUNTIME : kind), &state);
        }
    }
    return NULL;
}

int main(int argc, char **argv) {
    int threads = argc > 2 ? atoi(argv[2]) : 8, i, kind;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1, state = seed + 1;
    const char *name = argc > 4 ? argv[4] : "cpu:0";
    leasehold_runtime_info info = {.size = sizeof info};
    leasehold_stream stream;
    pthread_t all[MOST_THREADS];
    budget_of_calls = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    on_cpu = strncmp(name, "cpu", 3) == 0;
    if (CALL(device_open, name, NULL, &device) != LEASEHOLD_OK || CALL(runtime_open, device, &first) != LEASEHOLD_OK) {
        fprintf(stderr, "%s: %s\n", name, leasehold_last_error());
        return 1;
    }
    for (i = 0; i < SLOTS; i++) {
        for (kind = 0; kind < KINDS; kind++) {
            make(kind, &state);
        }
    }
    for (i = 0; i < threads; i++) {
        pthread_create(&all[i], NULL, work, (void *)(uintptr_t)(seed * 100 + (uint64_t)i));
    }
    for (i = 0; i < threads; i++) {
        pthread_join(all[i], NULL);
    }
    for (kind = 0; kind < KINDS; kind++) {
        for (i = 0; i < SLOTS; i++) {
            if (slots[kind][i] != 0) {
                drop(kind, slots[kind][i]);
            }
        }
    }
    /* Objects of the last calls end a moment after them. */
    for (i = 0; i < 10000; i++) {
        CALL(runtime_synchronize, first, 10000000000);
        CALL(runtime_describe, first, &info);
        if (info.allocated_bytes == 0 && contexts == 0) {
            break;
        }
    }
    if (info.allocated_bytes != 0 || contexts != 0) {
        fprintf(stderr, "left: %llu bytes, %llu contexts\n", (unsigned long long)info.allocated_bytes, (unsigned long long)contexts);
        wrong++;
    }
    CALL(runtime_stream, first, &stream);
    CALL(stream_release, stream);
    CALL(runtime_close, first, 10000000000);
    if (CALL(device_close, device) != LEASEHOLD_OK) {
        fprintf(stderr, "the device: %s\n", leasehold_last_error());
        wrong++;
    }
#ifdef LEASEHOLD_SIM
    if (strncmp(name, "sim-", 4) == 0) {
        wrong += races_found();
    }
#endif
    printf("%s: %llu calls; statuses", wrong == 0 ? "ok" : "wrong", (unsigned long long)calls);
    for (i = 0; i < STATUSES; i++) {
        if (statuses[i] != 0) {
            printf(" %d:%llu", i, (unsigned long long)statuses[i]);
        }
    }
    printf("\n");
    return wrong != 0;
}
