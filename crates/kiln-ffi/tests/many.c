/* Generates images and watches the process's memory: many MODEL COUNT */
#define _POSIX_C_SOURCE 200809L
#include <kiln.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Resident memory in KiB. */
static long resident(void) {
    long pages = 0, rss = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%ld %ld", &pages, &rss) != 2) {
        exit(3);
    }
    fclose(file);
    return rss * (sysconf(_SC_PAGESIZE) / 1024);
}

static void generate(kiln_model *model, unsigned seed) {
    kiln_request request = {.size = sizeof request, .prompt = "a red fox", .width = 64, .height = 64, .steps = 1};
    request.seed = seed;
    request.has_seed = 1;
    request.max_tokens = 8;
    kiln_images *images = NULL;
    kiln_buffer png = {NULL, 0};
    if (kiln_generate(model, &request, NULL, NULL, &images) != KILN_STATUS_OK ||
        kiln_image_png(images, 0, &png) != KILN_STATUS_OK) {
        fprintf(stderr, "%s\n", kiln_last_error());
        exit(1);
    }
    kiln_buffer_free(&png);
    kiln_images_free(images);
}

int main(int argc, char **argv) {
    const unsigned count = argc > 2 ? (unsigned)atoi(argv[2]) : 100;
    kiln_model *model = NULL;
    if (argc < 2 || kiln_model_open(argv[1], NULL, &model) != KILN_STATUS_OK) {
        fprintf(stderr, "%s\n", kiln_last_error());
        return 1;
    }
    /* Caches and the allocator's pools fill first. */
    for (unsigned i = 0; i < 20; i++) {
        generate(model, i);
    }
    /* Threads that first get work late make a round grow; a leak makes each one grow. */
    long before = 0, after = 0;
    int grown = 1;
    for (int round = 0; grown && round < 4; round++) {
        before = resident();
        for (unsigned i = 0; i < count; i++) {
            generate(model, i);
        }
        after = resident();
        /* An image of 64x64 has 12 KiB of pixels: that many leaked would be more. */
        grown = after - before > 512 + 6L * (long)count;
    }
    kiln_model_free(model);
    printf("%ld KiB, after %u images %ld KiB\n", before, count, after);
    if (grown) {
        fprintf(stderr, "memory grew from %ld KiB to %ld KiB over %u images, as in each round before\n", before, after, count);
        return 1;
    }
    return 0;
}
