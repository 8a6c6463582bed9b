/* Checks of the tests in C: each ends the program with status 1, and says what is wrong. */
#ifndef LEASEHOLD_TEST_CHECKS_H
#define LEASEHOLD_TEST_CHECKS_H

#include "leasehold_runtime.h"

#include <stdio.h>
#include <stdlib.h>

#define SECONDS 1000000000ull

#define OK(call) is(LEASEHOLD_OK, call, __LINE__, #call)
#define INVALID(call) is(LEASEHOLD_INVALID_ARGUMENT, call, __LINE__, #call)
#define STATE(call) is(LEASEHOLD_INVALID_STATE, call, __LINE__, #call)
#define IS(status, call) is(status, call, __LINE__, #call)
#define THAT(condition) that(condition, __LINE__, #condition)

/* The call has this status, and a failure has a text. */
static inline void is(int expected, int status, int line, const char *call) {
    if (status != expected) {
        fprintf(stderr, "line %d: %s: %d, not %d: %s\n", line, call, status, expected, leasehold_last_error());
        exit(1);
    }
    if (status != LEASEHOLD_OK && leasehold_last_error()[0] == '\0') {
        fprintf(stderr, "line %d: %s: no text\n", line, call);
        exit(1);
    }
}

static inline void that(int condition, int line, const char *text) {
    if (!condition) {
        fprintf(stderr, "line %d: not so: %s: %s\n", line, text, leasehold_last_error());
        exit(1);
    }
}

#endif
