/* Forks of a process whose threads use the C ABI; the argument is the number of children. Exit status 0 if all is well. */
#define _GNU_SOURCE
#include "objects.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;
#define CHECK(c) ((c) ? (void)0 : (void)(failures++, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c)))

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
        tensor_create(rand_r(&s) % 100);
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
    tensor_hooks();
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
                CHECK(tensor_create(i % 100));
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

int main(int count, char **words) { return forks(count > 1 ? atoi(words[1]) : 40); }
