/* Children of a process whose threads use a device: each call has an answer there, and none hangs. */
#define _GNU_SOURCE
#include "leasehold.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static leasehold_device device;
static leasehold_pool pool;
static atomic_int stop;

static void *busy(void *argument) {
    unsigned seed = (unsigned)(size_t)argument;
    while (!stop) {
        void *blocks[8];
        int i;
        for (i = 0; i < 8; i++) {
            if (leasehold_malloc(device, (size_t)64 << (rand_r(&seed) % 15), 0, &blocks[i]) != LEASEHOLD_OK) {
                abort();
            }
        }
        for (i = 0; i < 8; i++) {
            leasehold_free(device, blocks[i]);
        }
        if (rand_r(&seed) % 16 == 0) {
            leasehold_device other;
            leasehold_trim(device, 0, NULL);
            if (leasehold_device_open("cpu:0", NULL, &other) == LEASEHOLD_OK) {
                leasehold_device_close(other);
            }
        }
    }
    return NULL;
}

/* What a child does; 0 if all is refused. */
static int child(void *held, int turn) {
    leasehold_stats stats;
    leasehold_device other = 0;
    void *block = NULL;
    char text[200] = "", *json = NULL;
    int wrong = 0;
    stats.size = sizeof stats;
    wrong += leasehold_malloc(device, (size_t)64 << turn % 15, 0, &block) != LEASEHOLD_INVALID_STATE;
    wrong += block != NULL;
    wrong += leasehold_error_text(text, sizeof text) == 0 || strstr(text, "fork()") == NULL;
    wrong += leasehold_free(device, held) != LEASEHOLD_INVALID_STATE;
    wrong += leasehold_pool_malloc(pool, 100, 0, &block) != LEASEHOLD_INVALID_STATE;
    wrong += leasehold_stats_get(device, &stats) != LEASEHOLD_INVALID_STATE;
    wrong += leasehold_snapshot(device, &json) != LEASEHOLD_INVALID_STATE;
    wrong += leasehold_trim(device, 0, NULL) != LEASEHOLD_INVALID_STATE;
    wrong += leasehold_device_open("cpu:0", NULL, &other) != LEASEHOLD_INVALID_STATE;
    wrong += leasehold_device_close(device) != LEASEHOLD_INVALID_STATE;
    leasehold_plugin_free(held, 1, 0, NULL);
    return wrong;
}

int main(void) {
    pthread_t threads[4];
    void *held;
    size_t i;
    int n;
    if (leasehold_device_open("cpu:0", NULL, &device) || leasehold_pool_create(device, NULL, &pool) ||
        leasehold_malloc(device, 1000, 0, &held)) {
        return 1;
    }
    for (i = 0; i < 4; i++) {
        pthread_create(&threads[i], NULL, busy, (void *)(i + 1));
    }
    for (n = 0; n < 60; n++) {
        int status = 0, waited = 0;
        pid_t pid = fork();
        if (pid == 0) {
            int wrong = child(held, n);
            /* Every second child ends as a program does. */
            if (n % 2) {
                _exit(wrong);
            }
            exit(wrong);
        }
        while (waitpid(pid, &status, WNOHANG) == 0) {
            struct timespec nap = {0, 1000000};
            nanosleep(&nap, NULL);
            if (++waited > 20000) {
                kill(pid, SIGKILL);
                waitpid(pid, &status, 0);
                fprintf(stderr, "child %d hung\n", n);
                return 1;
            }
        }
        if (status != 0) {
            fprintf(stderr, "child %d: %#x\n", n, status);
            return 1;
        }
    }
    stop = 1;
    for (i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    if (leasehold_free(device, held) || leasehold_pool_release(pool) || leasehold_device_close(device)) {
        fprintf(stderr, "%s\n", leasehold_last_error());
        return 1;
    }
    puts("ok");
    return 0;
}
