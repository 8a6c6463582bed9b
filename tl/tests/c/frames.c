/* Frames that helpers open, frames that functions forget, frames of coroutines. Exit status 0 if all is well. */
#define _GNU_SOURCE
#include "leasehold_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

static int failures;
#define CHECK(c) ((c) ? (void)0 : (void)(failures++, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c)))
#define FUNCTION static __attribute__((noinline))
/* Keeps a call from becoming a jump, which would make it the caller's. */
#define NO_JUMP __asm__ volatile("")

FUNCTION void helper_enter(int64_t slots) { tl_mem_function_enter(slots); NO_JUMP; }
FUNCTION void helper_exit(void) { tl_mem_function_exit(); NO_JUMP; }
FUNCTION void forgets(void) {
    tl_mem_function_enter(1);
    char *mine = tl_mem_get_buffer(0, 10);
    if (mine) memset(mine, 'g', 10);
    NO_JUMP;
}
FUNCTION void forgets_and_uses_nothing(int64_t slots) { tl_mem_function_enter(slots); NO_JUMP; }

static int destroyed;
static void destroy(void *p) { destroyed++, free(p); }

/* A helper's frame inside a function that has one of its own is used and closed by that function. */
FUNCTION void with_helper(int64_t slots) {
    tl_mem_function_enter(1);
    char *own = tl_mem_get_buffer(0, 6);
    strcpy(own, "outer");
    helper_enter(slots);
    for (int64_t i = 0; i < slots; i++) {
        char *b = tl_mem_get_buffer(i, 10);
        CHECK(b && b != own && b == tl_mem_get_buffer(i, 10));
        if (b) memset(b, 'h', 10);
    }
    tl_mem_register_custom(malloc(8), destroy);
    destroyed = 0;
    tl_mem_function_exit();
    CHECK(destroyed == 1);
    CHECK(tl_mem_get_buffer(0, 6) == own && !strcmp(own, "outer"));
    tl_mem_function_exit();
    NO_JUMP;
}
/* And so is one that helpers open and close. */
FUNCTION void with_helpers(void) {
    tl_mem_function_enter(1);
    char *own = tl_mem_get_buffer(0, 6);
    helper_enter(2);
    char *b = tl_mem_get_buffer(1, 10);
    CHECK(b && b != own);
    helper_exit();
    CHECK(tl_mem_get_buffer(0, 6) == own);
    tl_mem_function_exit();
    NO_JUMP;
}
/* What is registered after a forgetful call lives until its function ends. */
FUNCTION void calls_forgetful(void) {
    tl_mem_function_enter(1);
    char *own = tl_mem_get_buffer(0, 6);
    strcpy(own, "outer");
    forgets();
    destroyed = 0;
    tl_mem_register_custom(malloc(8), destroy);
    CHECK(tl_mem_get_buffer(0, 6) == own && !strcmp(own, "outer"));
    CHECK(destroyed == 0);
    tl_mem_function_exit();
    CHECK(destroyed == 1);
}
FUNCTION void calls_unused(int64_t slots) {
    tl_mem_function_enter(0);
    forgets_and_uses_nothing(slots);
    tl_mem_function_exit();
    NO_JUMP;
}
/* A frame that was forgotten without a trace is found out by the next call. */
FUNCTION void outer(int64_t slots) {
    tl_mem_function_enter(1);
    char *own = tl_mem_get_buffer(0, 6);
    strcpy(own, "outer");
    int64_t depth = tl_get_scope_depth();
    for (int i = 0; i < 100; i++) {
        calls_unused(slots);
        CHECK(tl_mem_get_buffer(0, 6) == own);
        CHECK(tl_get_scope_depth() <= depth + 1);
    }
    CHECK(!strcmp(own, "outer"));
    tl_mem_function_exit();
    NO_JUMP;
}

/* A coroutine on a stack of its own, which is resumed before the function that it interrupts closes its frame. */
static ucontext_t main_context, coroutine;
static void on_other_stack(void) {
    tl_mem_function_enter(2);
    char *mine = tl_mem_get_buffer(0, 10);
    swapcontext(&coroutine, &main_context);
    memset(mine, 'c', 10);
    CHECK(tl_mem_get_buffer(0, 10) == mine);
    tl_mem_function_exit();
    swapcontext(&coroutine, &main_context);
}
FUNCTION void with_coroutine(void) {
    char *stack = mmap(0, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    getcontext(&coroutine);
    coroutine.uc_stack.ss_sp = stack, coroutine.uc_stack.ss_size = 1 << 16, coroutine.uc_link = &main_context;
    makecontext(&coroutine, on_other_stack, 0);
    tl_mem_function_enter(1);
    char *mine = tl_mem_get_buffer(0, 10);
    swapcontext(&main_context, &coroutine);
    CHECK(tl_mem_get_buffer(0, 10) == mine);
    swapcontext(&main_context, &coroutine);
    CHECK(tl_mem_get_buffer(0, 10) == mine);
    tl_mem_function_exit();
    munmap(stack, 1 << 16);
}

static int64_t repaired(void) { return tl_mem_misuses(TL_MISUSE_FRAME_REPAIRED); }
int main(void) {
    for (int64_t slots = 0; slots < 4; slots++) with_helper(slots);
    with_helpers();
    with_coroutine();
    CHECK(repaired() == 0 && tl_mem_misuses(TL_MISUSE_FUNCTION_EXIT) == 0 && tl_get_scope_depth() == 1);
    calls_forgetful();
    CHECK(repaired() == 1 && tl_get_scope_depth() == 1);
    outer(0);
    CHECK(tl_get_scope_depth() == 1 && repaired() == 1 + 100);
    outer(1); /* the place is known by now */
    CHECK(tl_get_scope_depth() == 1 && repaired() == 1 + 200);
    for (int i = 0; i < 3; i++) calls_unused(0);
    CHECK(tl_get_scope_depth() == 1 && tl_mem_misuses(TL_MISUSE_FUNCTION_EXIT) == 0);
    tl_mem_stats_t stats = {.size = sizeof stats};
    CHECK(tl_mem_stats(&stats) == 0 && stats.slot_buffers == 0 && stats.live_objects == 0);
    return failures != 0;
}
