/* Worlds and communicators, used rightly by two ranks that are threads: on the CPU both on one device, on the simulated driver each on its own.
 * Prints "ok", or what is wrong, with status 1.
 *
 *     ranks [cpu:0 | sim-cuda:0]
 */
#define _GNU_SOURCE
#include "checks.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#ifdef LEASEHOLD_SIM
#include "races.h"
#endif

enum { RANKS = 2, COUNT = 8 };

/* A rank's objects. */
typedef struct {
    leasehold_world world;
    leasehold_device device;
    leasehold_runtime runtime;
    leasehold_stream stream;
    leasehold_comm comm;
    uint32_t rank;
} rank;

static leasehold_operand part(leasehold_buffer buffer, uint64_t from, uint64_t count) {
    leasehold_operand operand = {buffer, from * sizeof(float), count * sizeof(float), 0, 0};
    return operand;
}

static const leasehold_operand none = {0, 0, 0, 0, 0};

static leasehold_buffer upload(const rank *r, const float *values, size_t count) {
    leasehold_buffer made;
    OK(leasehold_buffer_alloc(r->stream, count * sizeof(float), &made));
    OK(leasehold_stream_upload(r->stream, part(made, 0, count), values, count * sizeof(float), NULL));
    return made;
}

/* COUNT numbers from one on, a step apart. */
static leasehold_buffer numbers(const rank *r, float first, float step) {
    float values[COUNT];
    int i;
    for (i = 0; i < COUNT; i++) {
        values[i] = first + step * (float)i;
    }
    return upload(r, values, COUNT);
}

/* Says whether a buffer has these numbers, and releases it. */
static int has(const rank *r, leasehold_buffer buffer, float first, float step) {
    float values[COUNT];
    int i;
    OK(leasehold_stream_download_blocking(r->stream, values, sizeof values, part(buffer, 0, COUNT)));
    OK(leasehold_buffer_release(buffer));
    for (i = 0; i < COUNT && values[i] == first + step * (float)i; i++) {
    }
    return i == COUNT;
}

static void call(const rank *r, uint32_t what, uint32_t reduce, uint32_t other, leasehold_operand to, leasehold_operand from) {
    leasehold_collective one = {what, LEASEHOLD_F32, reduce, other, to, from};
    leasehold_point point = {0, 0};
    OK(leasehold_comm_call(r->comm, r->stream, &one, 1, &point));
    THAT(point.timeline != 0 && point.value != 0);
}

static leasehold_comm create(const rank *r, const char *name, uint32_t flags) {
    leasehold_comm_desc desc = {sizeof desc, name, 30 * SECONDS, flags, 0};
    leasehold_comm made = 0;
    OK(leasehold_comm_create(r->world, r->runtime, &desc, &made));
    return made;
}

static void calls(const rank *r) {
    const float me = (float)r->rank;
    const uint32_t other = 1 - r->rank;
    float wide[RANKS * COUNT] = {0};
    leasehold_buffer x = numbers(r, me, 1), y = numbers(r, 0, 0), all;
    leasehold_collective both[2];
    uint32_t element;

    call(r, LEASEHOLD_ALL_REDUCE, LEASEHOLD_SUM, 0, part(x, 0, COUNT), none);
    THAT(has(r, x, 1, 2));
    x = numbers(r, me, 1);
    call(r, LEASEHOLD_ALL_REDUCE, LEASEHOLD_LARGEST, 0, part(y, 0, COUNT), part(x, 0, COUNT));
    THAT(has(r, y, 1, 1) && has(r, x, me, 1));

    x = numbers(r, 10 * me, 0);
    all = upload(r, wide, RANKS * COUNT);
    call(r, LEASEHOLD_ALL_GATHER, 0, 0, part(all, 0, RANKS * COUNT), part(x, 0, COUNT));
    call(r, LEASEHOLD_REDUCE_SCATTER, LEASEHOLD_SUM, 0, part(x, 0, COUNT), part(all, 0, RANKS * COUNT));
    THAT(has(r, x, 20 * me, 0));

    x = numbers(r, me, 0);
    call(r, LEASEHOLD_BROADCAST, 0, 1, part(x, 0, COUNT), none);
    THAT(has(r, x, 1, 0));
    x = numbers(r, me + 2, 0);
    call(r, LEASEHOLD_REDUCE, LEASEHOLD_PRODUCT, 1, part(x, 0, COUNT), none);
    THAT(has(r, x, r->rank == 1 ? 6 : 2, 0));

    /* Half of it for each rank. */
    x = numbers(r, me, 0);
    y = numbers(r, 9, 0);
    call(r, LEASEHOLD_ALL_TO_ALL, 0, 0, part(y, 0, COUNT), part(x, 0, COUNT));
    OK(leasehold_stream_download_blocking(r->stream, wide, COUNT * sizeof(float), part(y, 0, COUNT)));
    THAT(wide[0] == 0 && wide[COUNT / 2 - 1] == 0 && wide[COUNT / 2] == 1 && wide[COUNT - 1] == 1);

    /* Two ranks that send to each other need a group. */
    memset(both, 0, sizeof both);
    both[0].call = LEASEHOLD_SEND;
    both[0].from = part(x, 0, COUNT);
    both[1].call = LEASEHOLD_RECV;
    both[1].to = part(y, 0, COUNT);
    both[0].element = both[1].element = LEASEHOLD_F32;
    both[0].rank = both[1].rank = other;
    OK(leasehold_comm_call(r->comm, r->stream, both, 2, NULL));
    THAT(has(r, y, (float)other, 0));
    OK(leasehold_comm_call(r->comm, r->stream, NULL, 0, NULL));

    for (element = LEASEHOLD_I8; element <= LEASEHOLD_F64; element++) {
        leasehold_collective zero = {LEASEHOLD_ALL_REDUCE, element, LEASEHOLD_LEAST, 0, part(x, 0, COUNT), none};
        OK(leasehold_stream_fill(r->stream, part(x, 0, COUNT), 0, 4, NULL));
        OK(leasehold_comm_call(r->comm, r->stream, &zero, 1, NULL));
    }
    THAT(has(r, x, 0, 0));
    OK(leasehold_buffer_release(all));
    memset(both, 0, sizeof both);
    both[0].call = LEASEHOLD_BARRIER;
    OK(leasehold_comm_call(r->comm, r->stream, both, 1, NULL));
    OK(leasehold_stream_synchronize(r->stream, 30 * SECONDS));
}

/* A graph with a sum; then recordings that differ between the ranks. */
static void recorded(rank *r) {
    leasehold_buffer x = numbers(r, (float)r->rank + 1, 0);
    leasehold_collective sum = {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, part(x, 0, COUNT), none};
    leasehold_stream recording;
    leasehold_graph graph, wrong;
    leasehold_comm_desc desc = {sizeof desc, "differing", 30 * SECONDS, 0, 0};
    leasehold_comm differing;
    OK(leasehold_record_begin(r->runtime, &recording));
    OK(leasehold_comm_call(r->comm, recording, &sum, 1, NULL));
    OK(leasehold_record_end(recording, &graph));
    OK(leasehold_stream_release(recording));
    OK(leasehold_graph_launch(graph, r->stream, NULL));
    OK(leasehold_graph_launch(graph, r->stream, NULL));
    THAT(has(r, x, 6, 0));
    OK(leasehold_graph_release(graph));

    OK(leasehold_comm_create(r->world, r->runtime, &desc, &differing));
    x = numbers(r, 1, 0);
    sum.to = part(x, 0, r->rank == 0 ? COUNT : COUNT / 2);
    OK(leasehold_record_begin(r->runtime, &recording));
    OK(leasehold_comm_call(differing, recording, &sum, 1, NULL));
    IS(LEASEHOLD_MISMATCH, leasehold_record_end(recording, &wrong));
    THAT(strstr(leasehold_last_error(), "rank 0") != NULL && strstr(leasehold_last_error(), "rank 1") != NULL);
    OK(leasehold_stream_release(recording));
    OK(leasehold_comm_release(differing));
    THAT(has(r, x, 1, 0));
}

/* Parts of a communicator, and what is left of one that was ended. */
static void parts(const rank *r) {
    leasehold_comm_info info = {.size = sizeof info};
    leasehold_comm whole = create(r, "whole", LEASEHOLD_COMM_NO_SENDS | LEASEHOLD_COMM_CHECK_EACH), part = 0, rest = 0;
    const struct timespec tick = {0, 1000000};
    const uint32_t lost = 1;
    int status = LEASEHOLD_OK, i;
    OK(leasehold_comm_split(whole, 7, -(int32_t)r->rank, &part));
    OK(leasehold_comm_describe(part, &info));
    THAT(info.ranks == 2 && info.rank == 1 - r->rank && strlen(info.library) > 0);
    OK(leasehold_comm_release(part));
    OK(leasehold_comm_split(whole, r->rank == 0 ? 0 : LEASEHOLD_NO_COLOR, 0, &part));
    THAT((part != 0) == (r->rank == 0));
    if (part != 0) {
        OK(leasehold_comm_describe(part, &info));
        THAT(info.ranks == 1 && info.rank == 0);
        OK(leasehold_comm_release(part));
    }
    if (r->rank == 1) {
        OK(leasehold_comm_failure(whole, &status));
        THAT(status == LEASEHOLD_OK);
        OK(leasehold_comm_abort(whole, "of a test"));
    }
    for (i = 0; i < 30000 && status == LEASEHOLD_OK; i++) {
        OK(leasehold_comm_failure(whole, &status));
        nanosleep(&tick, NULL);
    }
    THAT(status == (r->rank == 1 ? LEASEHOLD_FAILED : LEASEHOLD_PEER_LOST));
    if (r->rank == 0) {
        OK(leasehold_comm_shrink(whole, &lost, 1, &rest));
        OK(leasehold_comm_describe(rest, &info));
        THAT(info.ranks == 1);
        OK(leasehold_comm_release(rest));
    }
    OK(leasehold_comm_release(whole));
}

static void *work(void *argument) {
    rank *r = argument;
    leasehold_world_info world = {.size = sizeof world};
    leasehold_comm_info info = {.size = sizeof info};
    char *report;
    OK(leasehold_world_describe(r->world, &world));
    THAT(world.rank == r->rank && world.ranks == RANKS && world.local_rank == r->rank);
    OK(leasehold_world_retain(r->world));
    OK(leasehold_world_release(r->world));
    r->comm = create(r, "tp", 0);
    OK(leasehold_comm_retain(r->comm));
    OK(leasehold_comm_release(r->comm));
    OK(leasehold_comm_describe(r->comm, &info));
    THAT(info.rank == r->rank && info.ranks == RANKS);
    calls(r);
    recorded(r);
    parts(r);
    if (r->rank == 0) {
        OK(leasehold_world_report(r->world, 10 * SECONDS, &report));
        THAT(strstr(report, "rank 1") != NULL);
        leasehold_text_free(report);
    }
    OK(leasehold_comm_release(r->comm));
    OK(leasehold_world_close(r->world, 30 * SECONDS));
    return NULL;
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "cpu:0";
    const int simulated = strncmp(name, "sim-", 4) == 0;
    leasehold_world worlds[RANKS], launched;
    leasehold_world_info info = {.size = sizeof info};
    rank ranks[RANKS];
    pthread_t threads[RANKS];
    uint32_t i;
    /* A launcher sets these. */
    setenv("LEASEHOLD_RANK", "0", 1);
    setenv("LEASEHOLD_WORLD", "1", 1);
    OK(leasehold_world_open(&launched));
    OK(leasehold_world_describe(launched, &info));
    THAT(info.rank == 0 && info.ranks == 1);
    OK(leasehold_world_close(launched, SECONDS));

    OK(leasehold_world_open_threads(RANKS, worlds));
    memset(ranks, 0, sizeof ranks);
    for (i = 0; i < RANKS; i++) {
        ranks[i].world = worlds[i];
        ranks[i].rank = i;
        OK(leasehold_device_open(!simulated ? name : i == 0 ? "sim-cuda:0" : "sim-cuda:1", NULL, &ranks[i].device));
        OK(leasehold_runtime_open(ranks[i].device, &ranks[i].runtime));
        OK(leasehold_stream_create(ranks[i].runtime, NULL, &ranks[i].stream));
    }
    for (i = 0; i < RANKS; i++) {
        THAT(pthread_create(&threads[i], NULL, work, &ranks[i]) == 0);
    }
    for (i = 0; i < RANKS; i++) {
        THAT(pthread_join(threads[i], NULL) == 0);
    }
    for (i = 0; i < RANKS; i++) {
        OK(leasehold_stream_release(ranks[i].stream));
        OK(leasehold_runtime_close(ranks[i].runtime, 30 * SECONDS));
        OK(leasehold_device_close(ranks[i].device));
    }
#ifdef LEASEHOLD_SIM
    if (simulated && races_found() != 0) {
        return 1;
    }
#endif
    printf("ok\n");
    return 0;
}
