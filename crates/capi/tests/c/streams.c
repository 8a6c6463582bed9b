/* Streams that come and go without leasehold_stream_end, on a simulated device. The memory is anybody's after
 * leasehold_device_synchronize, and at last when it is needed. */
#include "leasehold.h"

#include <stdio.h>

#define CHECK(call) \
    do { \
        if ((call) != LEASEHOLD_OK) { \
            printf("line %d: %s\n", __LINE__, leasehold_last_error()); \
            return 1; \
        } \
    } while (0)

static int passing(leasehold_device device, size_t bytes) {
    uintptr_t stream;
    void *block;
    CHECK(leasehold_sim_stream(device, 0, &stream));
    CHECK(leasehold_malloc(device, bytes, stream, &block));
    CHECK(leasehold_sim_fill(device, stream, block, 1, bytes));
    CHECK(leasehold_free(device, block));
    CHECK(leasehold_sim_stream_destroy(device, stream));
    return 0;
}

int main(void) {
    leasehold_device_options options = {sizeof options, 64 << 20, 0, 0, 0};
    leasehold_stats stats = {.size = sizeof stats};
    leasehold_device device;
    uintptr_t own;
    void *block;
    char *races;
    CHECK(leasehold_device_open("sim-cuda:0", &options, &device));
    CHECK(leasehold_sim_stream(device, 0, &own));
    for (int synchronized = 1; synchronized >= 0; synchronized--) {
        if (passing(device, 32 << 20) || passing(device, 32 << 20)) return 1;
        if (synchronized) {
            CHECK(leasehold_device_synchronize(device));
            CHECK(leasehold_stats_get(device, &stats));
            if (stats.free_pending_bytes != 0) {
                printf("%llu bytes are still pending\n", (unsigned long long)stats.free_pending_bytes);
                return 1;
            }
        }
        CHECK(leasehold_malloc(device, 60 << 20, own, &block));
        CHECK(leasehold_sim_fill(device, own, block, 2, 60 << 20));
        CHECK(leasehold_free(device, block));
        CHECK(leasehold_device_synchronize(device));
        CHECK(leasehold_trim(device, 0, NULL));
    }
    CHECK(leasehold_sim_races(&races));
    if (*races) {
        puts(races);
        return 1;
    }
    leasehold_text_free(races);
    CHECK(leasehold_stream_end(device, own));
    CHECK(leasehold_device_close(device));
    puts("ok");
    return 0;
}
