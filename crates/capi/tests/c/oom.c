/* Host memory fails from the n-th allocation of a call on, for each call and each n: the call has a status, and the library goes on when
 * there is memory again. One child for each; the program has the functions that fail. Needs the C library of GNU.
 */
#define _GNU_SOURCE
#include "leasehold.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *block, size_t bytes);
extern void *__libc_memalign(size_t align, size_t bytes);

/* Allocations of this thread until they fail; below 0: none fails. */
static _Thread_local long left = -1;

static int fails(void) {
    if (left < 0) {
        return 0;
    }
    if (left > 0) {
        left--;
        return 0;
    }
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { return fails() ? NULL : __libc_calloc(count, bytes); }
void *realloc(void *block, size_t bytes) { return fails() ? NULL : __libc_realloc(block, bytes); }
void *aligned_alloc(size_t align, size_t bytes) { return fails() ? NULL : __libc_memalign(align, bytes); }
int posix_memalign(void **block, size_t align, size_t bytes) {
    void *made = fails() ? NULL : __libc_memalign(align, bytes);
    if (made == NULL) {
        return ENOMEM;
    }
    *block = made;
    return 0;
}

enum { CALLS = 13, MANY = 3000 };

static void *blocks[MANY];

static void visit(void *context, const leasehold_block *block) {
    (void)context;
    (void)block;
}

/* Makes a call. What it returns is a status that its caller understands. */
static int go(int call, leasehold_device device, leasehold_pool pool, void *held) {
    leasehold_device_options traced = {sizeof traced, 0, 0, 1 << 24, 0};
    leasehold_device other = 0;
    leasehold_pool made = 0;
    char *text = NULL;
    int status = LEASEHOLD_OK, i;
    switch (call) {
    case 0:
        if ((status = leasehold_device_open("cpu:0", NULL, &other)) == LEASEHOLD_OK) {
            status = leasehold_device_close(other);
        }
        break;
    case 1:
        status = leasehold_malloc(device, 3 << 20, 0, &blocks[0]);
        break;
    case 2:
        for (i = 0; i < MANY && status == LEASEHOLD_OK; i++) {
            status = leasehold_malloc(device, 64, 0, &blocks[i]);
        }
        break;
    case 3:
        if ((status = leasehold_pool_create(device, NULL, &made)) == LEASEHOLD_OK) {
            status = leasehold_pool_release(made);
        }
        break;
    case 4:
        status = leasehold_snapshot(device, &text);
        break;
    case 5:
        status = leasehold_report(device, &text);
        break;
    case 6:
        status = leasehold_free(device, (void *)8) == LEASEHOLD_INVALID_ARGUMENT ? LEASEHOLD_OK : -1;
        break;
    case 7:
        status = leasehold_visit_blocks(device, visit, NULL);
        break;
    case 8:
        status = leasehold_block_set_name(device, held, "a name that nobody had");
        break;
    case 9:
        status = leasehold_pool_begin(pool, NULL, NULL);
        break;
    case 10:
        if ((status = leasehold_pool_suspend(pool, LEASEHOLD_SUSPEND_KEEP, NULL)) == LEASEHOLD_OK) {
            status = leasehold_pool_resume(pool);
        }
        break;
    case 11:
        if ((status = leasehold_device_open("cpu:0", &traced, &other)) == LEASEHOLD_OK) {
            status = leasehold_device_close(other);
        }
        break;
    default:
        /* Many devices, until there is no memory for another one. */
        for (i = 0; i < 100 && status == LEASEHOLD_OK; i++) {
            status = leasehold_device_open("cpu:0", NULL, &other);
        }
        break;
    }
    leasehold_text_free(text);
    return status;
}

static int child(int call, long n) {
    leasehold_pool_options options = {sizeof options, "pool", 0, LEASEHOLD_POOL_SUSPENDABLE};
    leasehold_device device;
    leasehold_pool pool;
    void *held, *block;
    uint64_t freed;
    int status, i, reached;
    if (leasehold_device_open("cpu:0", NULL, &device) || leasehold_pool_create(device, &options, &pool) ||
        leasehold_pool_malloc(pool, 5000, 0, &held)) {
        return 100;
    }
    memset(held, 7, 5000);
    /* The threads of the device start here: that needs memory. */
    if (leasehold_pool_suspend(pool, LEASEHOLD_SUSPEND_KEEP, NULL) || leasehold_pool_resume(pool)) {
        return 105;
    }
    left = n;
    status = go(call, device, pool, held);
    reached = left == 0;
    left = -1;
    if (status != LEASEHOLD_OK && status != LEASEHOLD_OUT_OF_MEMORY && status != LEASEHOLD_UNAVAILABLE) {
        fprintf(stderr, "call %d, %ld: %d %s\n", call, n, status, leasehold_last_error());
        return 101;
    }
    /* With memory again all goes on. */
    leasehold_pool_end(pool);
    leasehold_pool_resume(pool);
    if (memcmp(held, (char *)held + 1, 4999) != 0 || *(char *)held != 7) {
        return 102;
    }
    for (i = 0; i < MANY; i++) {
        if (leasehold_free(device, blocks[i])) {
            return 103;
        }
    }
    if (leasehold_malloc(device, 1 << 20, 0, &block) || leasehold_free(device, block) || leasehold_free(device, held) ||
        leasehold_pool_release(pool) || leasehold_trim(device, 0, &freed) || leasehold_device_close(device)) {
        fprintf(stderr, "after call %d, %ld: %s\n", call, n, leasehold_last_error());
        return 104;
    }
    return reached ? 1 : 0;
}

int main(void) {
    int call;
    long n, made = 0;
    for (call = 0; call < CALLS; call++) {
        /* Until a call makes fewer allocations than n. */
        for (n = 0; n < 150; n += n < 12 ? 1 : 17) {
            int status;
            pid_t pid = fork();
            if (pid == 0) {
                alarm(60);
                _exit(child(call, n));
            }
            if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) > 1) {
                fprintf(stderr, "call %d with %ld allocations: %#x\n", call, n, status);
                return 1;
            }
            made++;
            if (WEXITSTATUS(status) == 0) {
                break;
            }
        }
    }
    printf("ok: %ld\n", made);
    return 0;
}
