/* Ranks from C: each has numbers of its own, and all get the mean, eagerly and by a graph.
 *
 *     ranks [cpu:0 | cuda:0 …]                    two ranks that are threads
 *     torchrun --nproc-per-node 2 --no-python ranks cuda    a rank for each process, on the GPU of its number
 */
#include "leasehold_runtime.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 1000, RANKS = 2 };
#define LIMIT 60000000000ull

/* Ends the program after a failure, with its text. */
static void check(int status, const char *what) {
    if (status != LEASEHOLD_OK) {
        fprintf(stderr, "%s: %s (%d)\n", what, leasehold_last_error(), status);
        exit(1);
    }
}

static const char *kind = "cpu:0";

static leasehold_operand whole(leasehold_buffer buffer) {
    leasehold_operand operand = {buffer, 0, LEASEHOLD_WHOLE, 0, 0};
    return operand;
}

/* The program of each rank. It closes its world. */
static void run(leasehold_world world) {
    static const leasehold_operand none = {0, 0, 0, 0, 0};
    leasehold_world_info info;
    leasehold_device device;
    leasehold_runtime runtime;
    leasehold_stream stream, recording;
    leasehold_comm comm;
    leasehold_buffer x;
    leasehold_graph graph;
    float values[COUNT];
    char name[32];
    int i;
    info.size = sizeof info;
    check(leasehold_world_describe(world, &info), "world");
    if (strchr(kind, ':') != NULL) {
        snprintf(name, sizeof name, "%s", kind);
    } else {
        snprintf(name, sizeof name, "%s:%u", kind, (unsigned)info.local_rank);
    }
    check(leasehold_device_open(name, NULL, &device), name);
    check(leasehold_runtime_open(device, &runtime), "runtime");
    check(leasehold_stream_create(runtime, NULL, &stream), "stream");
    check(leasehold_buffer_alloc(stream, sizeof values, &x), "buffer");
    for (i = 0; i < COUNT; i++) {
        values[i] = (float)(info.rank + 1) * (float)i;
    }
    check(leasehold_stream_upload(stream, whole(x), values, sizeof values, NULL), "upload");

    leasehold_collective mean = {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_AVERAGE, 0, whole(x), none};
    check(leasehold_comm_create(world, runtime, NULL, &comm), "communicator");
    check(leasehold_comm_call(comm, stream, &mean, 1, NULL), "mean");

    /* The means of equal numbers are these numbers. The end compares the ranks' recordings. */
    check(leasehold_record_begin(runtime, &recording), "recording");
    check(leasehold_comm_call(comm, recording, &mean, 1, NULL), "recorded mean");
    check(leasehold_record_end(recording, &graph), "graph");
    check(leasehold_graph_launch(graph, stream, NULL), "launch");

    check(leasehold_stream_download_blocking(stream, values, sizeof values, whole(x)), "download");
    for (i = 0; i < COUNT; i++) {
        if (values[i] != (float)(info.ranks + 1) / 2 * (float)i) {
            fprintf(stderr, "rank %u: %d: %g\n", (unsigned)info.rank, i, (double)values[i]);
            exit(1);
        }
    }
    check(leasehold_graph_release(graph), "graph");
    check(leasehold_stream_release(recording), "recording");
    check(leasehold_buffer_release(x), "buffer");
    check(leasehold_stream_release(stream), "stream");
    check(leasehold_comm_release(comm), "communicator");
    check(leasehold_world_close(world, LIMIT), "end of the ranks");
    check(leasehold_runtime_close(runtime, LIMIT), "runtime");
    check(leasehold_device_close(device), "device");
    if (info.rank == 0) {
        printf("%u ranks on %s: ok\n", (unsigned)info.ranks, kind);
    }
}

static void *thread(void *world) {
    run(*(leasehold_world *)world);
    return NULL;
}

int main(int argc, char **argv) {
    leasehold_world worlds[RANKS];
    pthread_t threads[RANKS];
    int i, status = leasehold_world_open(worlds);
    kind = argc > 1 ? argv[1] : kind;
    if (status != LEASEHOLD_NOT_FOUND) {
        check(status, "world");
        run(worlds[0]);
        return 0;
    }
    /* No launcher. */
    check(leasehold_world_open_threads(RANKS, worlds), "worlds");
    for (i = 0; i < RANKS; i++) {
        if (pthread_create(&threads[i], NULL, thread, &worlds[i]) != 0) {
            return 1;
        }
    }
    for (i = 0; i < RANKS; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}
