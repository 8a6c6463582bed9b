/* Every allocation of the library fails from the n-th on: a call is then without effect, and the library goes on when there is memory again.
 * Built twice: with -DPRELOAD as the allocator that fails, and as the program, which forks one child for each call and each n. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef PRELOAD
static long left = -1;
void oom_arm(long n) { left = n; }
long oom_left(void) { return left; }
static int fail(void) {
    if (left < 0) return 0;
    if (left > 0) return left--, 0;
    errno = ENOMEM;
    return 1;
}
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }
#define REAL(f, name) do { if (!f) f = (__typeof__(f))real(name); } while (0)
void *malloc(size_t n) { static void *(*f)(size_t); REAL(f, "malloc"); return fail() ? 0 : f(n); }
void *realloc(void *p, size_t n) { static void *(*f)(void *, size_t); REAL(f, "realloc"); return fail() ? 0 : f(p, n); }
int posix_memalign(void **o, size_t a, size_t n) { static int (*f)(void **, size_t, size_t); REAL(f, "posix_memalign"); return fail() ? ENOMEM : f(o, a, n); }
void *aligned_alloc(size_t a, size_t n) { static void *(*f)(size_t, size_t); REAL(f, "aligned_alloc"); return fail() ? 0 : f(a, n); }
static char early[65536];
static size_t used;
void *calloc(size_t a, size_t b) {
    static int looking;
    static void *(*f)(size_t, size_t);
    if (!f) {
        if (looking) {
            void *p = early + used;
            used += (a * b + 15) & ~(size_t)15;
            return p;
        }
        looking = 1;
        f = (void *(*)(size_t, size_t))real("calloc");
    }
    return fail() ? 0 : f(a, b);
}
#else
#include "leasehold_memory.h"
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static void (*arm)(long);
static long (*left)(void);
static char blocks[8][64];
static void destroy(OpaqueTensor *t) { (void)t; }
static int32_t describe(const OpaqueTensor *t, tl_tensor_info *i) {
    (void)t;
    *i = (tl_tensor_info){4, 0, 0};
    return 1;
}
static void nothing(void *p) { (void)p; }
static uint64_t in(void) { return 0; }
static void out(uint64_t v) { (void)v; }

#define CALLS 25
static void go(int call) {
    char text[100];
    tl_mem_stats_t stats = {.size = sizeof stats};
    switch (call) {
    case 0: tl_mem_enter_scope(); break;
    case 1: for (int i = 0; i < 100; i++) tl_mem_enter_scope(); break;
    case 2: tl_mem_function_enter(100); break;
    case 3: tl_mem_function_enter(1), tl_mem_get_buffer(0, 100); break;
    case 4: tl_mem_register_custom(blocks[0], nothing), tl_ptr_release(blocks[0]); break;
    case 5: tl_mem_register_struct_named(blocks[1], "a name that is new"), tl_ptr_dec_ref(blocks[1]); break;
    case 6: tl_mem_register_tensor((OpaqueTensor *)blocks[2]), tl_ptr_release(blocks[2]); break;
    case 7: tl_mem_enter_scope(), tl_mem_register_tensor((OpaqueTensor *)blocks[3]), tl_mem_exit_scope(); break;
    case 8: tl_ptr_acquire(blocks[4]), tl_ptr_release(blocks[4]); break;
    case 9: tl_mem_register_tensor((OpaqueTensor *)blocks[2]), tl_ptr_release(blocks[2]), tl_mem_register_tensor(tl_pool_acquire(4, 0, 0)); break;
    case 10: tl_mem_register_struct_sized(blocks[1], "another name", 64), tl_ptr_dec_ref(blocks[1]); break;
    case 11: tl_mem_leak_report(text, sizeof text); break;
    case 12: tl_mem_stats(&stats); break;
    case 13: tl_mem_exit_scope(), tl_mem_last_error(text, sizeof text); break;
    case 14: tl_pool_acquire(4, 0, 0); break;
    case 15: tl_pool_trim(0); break;
    case 16: { tl_vec_ptr *v = calloc(1, sizeof *v); tl_mem_register_vec_ptr(v), tl_ptr_release(v); break; }
    case 17: tl_mem_set_scope_hooks(in, out), tl_mem_enter_scope(), tl_mem_exit_scope(); break;
    case 18: tl_get_pool_count(); break;
    case 19: tl_mem_register_ptr(blocks[6]); break;
    case 20: for (int i = 0; i < 64; i++) tl_mem_register_custom(&blocks[0][0] + i, nothing); break;
    case 21: tl_get_scope_depth(); break;
    case 22: tl_mem_register_custom(blocks[0], nothing), tl_mem_close_thread(); break;
    case 23: tl_mem_register_custom(blocks[0], nothing), tl_mem_leak_report(text, sizeof text), tl_mem_unregister(blocks[0]); break;
    case 24: tl_mem_misuses(0), tl_mem_mark(), tl_mem_unwind(0), tl_mem_promote(blocks[7]), tl_mem_is_registered(blocks[7]); break;
    }
}
static int call;
static long at;
static void *armed(void *unused) {
    arm(at);
    go(call);
    return unused;
}
/* What a child says: 0 memory lasted, 1 it did not; anything else is a failure. */
static int child(int warm, int thread) {
    char text[100];
    if (warm) {
        tl_mem_set_tensor_destructor(destroy);
        tl_mem_set_tensor_describer(describe);
        tl_mem_enter_scope(), tl_mem_exit_scope();
    }
    pthread_t t;
    if (thread) {
        if (pthread_create(&t, 0, armed, 0)) return 50;
        pthread_join(t, 0);
    } else armed(0);
    if (!thread) tl_mem_last_error(text, sizeof text);
    int failed = left() == 0;
    arm(-1);
    tl_mem_stats_t stats = {.size = sizeof stats};
    if (tl_mem_stats(&stats)) return 51;
    if (!failed && stats.misuses[TL_MISUSE_OUT_OF_MEMORY]) return 52;
    /* On it goes. */
    int64_t depth = tl_get_scope_depth();
    tl_mem_enter_scope();
    void *p = malloc(8);
    tl_mem_register_struct(p);
    if (tl_get_scope_depth() != depth + 1 || !tl_mem_is_registered(p)) return 53;
    tl_mem_register_tensor((OpaqueTensor *)blocks[5]);
    if (!tl_mem_is_registered(blocks[5])) return 54;
    tl_mem_exit_scope();
    if (tl_get_scope_depth() != depth) return 55;
    return failed;
}
int main(void) {
    arm = (void (*)(long))dlsym(RTLD_DEFAULT, "oom_arm");
    left = (long (*)(void))dlsym(RTLD_DEFAULT, "oom_left");
    if (!arm || !left) return puts("not preloaded"), 3;
    int failures = 0, ran = 0;
    for (int mode = 0; mode < 3; mode++)
        for (call = 0; call < CALLS; call++)
            for (at = 0, ran++; at < 100; at++, ran++) {
                pid_t pid = fork();
                if (pid == 0) _exit(child(mode != 0, mode == 2));
                int status;
                waitpid(pid, &status, 0);
                if (!WIFEXITED(status) || WEXITSTATUS(status) > 1) {
                    fprintf(stderr, "mode %d, call %d, failing from %ld on: status %x\n", mode, call, at, status);
                    failures++;
                }
                if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
            }
    printf("%d processes\n", ran);
    return failures != 0;
}
#endif
