// An exception in a destructor: caught inside it (exit status 0), or not ("out": the process must end, and not go on with status 1).
#include "leasehold_memory.h"

#include <cstring>

static bool out = false;
static int destroyed = 0;
static void throws(void *) {
    destroyed++;
    try {
        throw 3;
    } catch (int) {
        if (out) throw;
    }
}

int main(int, char **words) {
    static int first, second;
    out = !std::strcmp(words[1], "out");
    try {
        tl_mem_enter_scope();
        tl_mem_register_custom(&first, throws);
        tl_mem_register_custom(&second, throws);
        tl_mem_exit_scope();
    } catch (int) {
        return 1;
    }
    return destroyed == 2 && tl_get_scope_depth() == 1 ? 0 : 1;
}
