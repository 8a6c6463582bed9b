/* The races that the simulated machine has found. */
#ifndef LEASEHOLD_TEST_RACES_H
#define LEASEHOLD_TEST_RACES_H

#include <stdio.h>
#include <string.h>

/* Prints the races, and returns their number. Reads of memory that nobody wrote are no races: random programs make them. */
static unsigned races_found(void) {
    char *races = NULL, *line;
    unsigned found = 0;
    if (leasehold_sim_races(&races) != LEASEHOLD_OK) {
        fprintf(stderr, "races: %s\n", leasehold_last_error());
        return 1;
    }
    for (line = strtok(races, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        if (strstr(line, "nobody wrote") == NULL) {
            fprintf(stderr, "race: %s\n", line);
            found++;
        }
    }
    leasehold_text_free(races);
    return found;
}

#endif
