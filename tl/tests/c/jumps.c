/* A program that closes each frame that it opens, by the last call of the function. Compilers make a jump of that call. With
 * -DPLAIN the calls are those of compiled code, which has no header. Exit status 0 if all is well. */
#include "leasehold_memory.h"

#include <stdio.h>
#include <string.h>

#ifdef PLAIN
#undef tl_mem_function_exit
#endif
#define FUNCTION static __attribute__((noinline))

FUNCTION void leaf(void) {
    tl_mem_function_enter(1);
    memset(tl_mem_get_buffer(0, 100), 1, 100);
    tl_mem_function_exit();
}
FUNCTION void unused(void) {
    tl_mem_function_enter(1);
    tl_mem_function_exit();
}
FUNCTION void middle(void) {
    tl_mem_function_enter(1);
    leaf();
    unused();
    unused();
    tl_mem_function_exit();
}

int main(void) {
    tl_mem_function_enter(1);
    char *mine = tl_mem_get_buffer(0, 64);
    strcpy(mine, "mine");
    int64_t depth = tl_get_scope_depth();
    for (int i = 0; i < 100; i++) middle();
    int64_t now = tl_get_scope_depth(), repaired = tl_mem_misuses(TL_MISUSE_FRAME_REPAIRED);
    printf("depth %lld, then %lld; %lld frames repaired\n", (long long)depth, (long long)now, (long long)repaired);
    int wrong = now != depth || repaired != 0 || tl_mem_get_buffer(0, 64) != (void *)mine || strcmp(mine, "mine") != 0;
    tl_mem_function_exit();
    return wrong;
}
