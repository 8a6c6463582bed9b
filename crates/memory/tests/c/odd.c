/* The C ABI in odd places; the first argument says which. Exit status 0 if all is well, 3 if the system does not allow it. */
#define _GNU_SOURCE
#include "leasehold_memory.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;
#define CHECK(c) ((c) ? (void)0 : (void)(failures++, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c)))

/* A sandbox that is entered after the library's first call, and refuses membarrier. Each region of a KiB has a lock of its own in the
 * library, and its first meeting of two threads is one chance for both to hold it. What the owner found its own before must be safe
 * too: the first half of the regions is taken before the sandbox is entered. */
#define REGIONS 64
static char *arena;
static atomic_int region = -1, reached = -1;
static atomic_long lost;
static void once(char *p) {
    tl_ptr_acquire(p);
    if (!tl_ptr_release_bool(p)) atomic_fetch_add(&lost, 1);
}
static atomic_int entered;
static void *owner(void *unused) {
    for (int r = 0; r < REGIONS / 2; r++) once(arena + (size_t)r * 1024);
    atomic_store(&entered, 1);
    while (atomic_load(&entered) != 2) sched_yield();
    for (int r = 0; r < REGIONS; r++) {
        char *base = arena + (size_t)r * 1024;
        once(base);
        atomic_store(&region, r);
        for (int round = 0; atomic_load(&reached) != r; round++) {
            for (int i = 0; i < 8; i++) once(base + 16 * i);
            if (round > 50) sched_yield();
        }
    }
    return unused;
}
static void *visitor(void *unused) {
    for (int r = 0; r < REGIONS; r++) {
        while (atomic_load(&region) != r) sched_yield();
        for (int i = 0; i < 40; i++) once(arena + (size_t)r * 1024 + 8 + 16 * i);
        atomic_store(&reached, r);
    }
    return unused;
}
static int sandboxed(int refuse_affinity) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refuse_affinity ? SYS_sched_setaffinity : SYS_membarrier, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    arena = aligned_alloc(1024, REGIONS * 1024);
    pthread_t t, u;
    pthread_create(&t, 0, owner, 0);
    while (atomic_load(&entered) != 1) sched_yield();
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return 3;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program)) return 3;
    if (syscall(SYS_membarrier, 0, 0, 0) != -1 || errno != EPERM) return 3;
    atomic_store(&entered, 2);
    pthread_create(&u, 0, visitor, 0);
    pthread_join(t, 0), pthread_join(u, 0);
    CHECK(atomic_load(&lost) == 0);
    CHECK(tl_get_object_count() == 0);
    free(arena);
    return failures != 0;
}

/* Children of a process with busy threads: everything works in them, and nothing hangs. */
static atomic_int stop;
static void *work(void *seed) {
    unsigned s = (unsigned)(size_t)seed;
    char name[16];
    while (!atomic_load(&stop)) {
        tl_mem_enter_scope();
        for (int i = 0; i < 20; i++) {
            void *p = malloc(16 + rand_r(&s) % 500);
            snprintf(name, sizeof name, "N%d", rand_r(&s) % 1000);
            tl_mem_register_struct_sized(p, name, 16);
            if (rand_r(&s) % 2) tl_ptr_acquire(p), tl_ptr_release(p);
        }
        const int64_t shape[1] = {rand_r(&s) % 100};
        lh_tensor_create(shape, 1, 0);
        tl_mem_exit_scope();
        tl_mem_stats_t stats = {.size = sizeof stats};
        if (rand_r(&s) % 8 == 0) tl_mem_stats(&stats);
    }
    return 0;
}
static void *fresh(void *child_of) {
    tl_mem_enter_scope();
    tl_mem_register_struct(malloc(8));
    tl_ptr_acquire(child_of), tl_ptr_release(child_of);
    tl_mem_exit_scope();
    return child_of;
}
static int forks(int children) {
    pthread_t t[3];
    int hung = 0, died = 0;
    for (size_t i = 0; i < 3; i++) pthread_create(&t[i], 0, work, (void *)(i + 1));
    tl_mem_enter_scope();
    void *before = malloc(100);
    tl_mem_register_struct(before);
    for (int k = 0; k < children; k++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            CHECK(tl_mem_is_registered(before) && tl_get_scope_depth() == 2);
            for (int i = 0; i < 500; i++) {
                tl_mem_enter_scope();
                tl_mem_register_struct_named(malloc((size_t)(32 + i % 999)), "in a child");
                const int64_t shape[1] = {i % 100};
                CHECK(lh_tensor_create(shape, 1, 0));
                tl_mem_exit_scope();
            }
            tl_mem_stats_t stats = {.size = sizeof stats};
            CHECK(tl_mem_stats(&stats) == 0 && stats.threads == 1);
            pthread_t u;
            CHECK(pthread_create(&u, 0, fresh, before) == 0 && pthread_join(u, 0) == 0);
            CHECK(tl_ptr_release_bool(before) == 1 && tl_ptr_release_bool(before) == 0);
            _exit(failures != 0);
        }
        int status;
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) hung++;
        else if (status) died++;
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 3; i++) pthread_join(t[i], 0);
    CHECK(hung == 0);
    CHECK(died == 0);
    CHECK(tl_mem_is_registered(before));
    tl_mem_exit_scope();
    CHECK(tl_get_object_count() == 0);
    return failures != 0;
}

int main(int count, char **words) {
    const char *word = count > 1 ? words[1] : "";
    if (!strcmp(word, "sandbox")) return sandboxed(0);
    if (!strcmp(word, "strict-sandbox")) return sandboxed(1);
    if (!strcmp(word, "fork")) return forks(count > 2 ? atoi(words[2]) : 40);
    return 2;
}
