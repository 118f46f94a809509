/* Generates an image and saves it with its recipe: generate MODEL PROMPT OUT.png [WIDTH HEIGHT STEPS SEED] */
#include <kiln.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, kiln_last_error());
    if (*kiln_last_hint() != '\0') {
        fprintf(stderr, "hint: %s\n", kiln_last_hint());
    }
    return 1;
}

static int show_progress(const kiln_progress *progress, void *user) {
    (void)user;
    fprintf(stderr, "\rstep %u of %u, %3.0f %%", (unsigned)progress->step, (unsigned)progress->steps,
            (double)progress->fraction * 100.0);
    return 0;
}

static void show_message(const char *message, void *user) {
    (void)user;
    fprintf(stderr, "%s\n", message);
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s MODEL PROMPT OUT.png [WIDTH HEIGHT STEPS SEED]\n", argv[0]);
        return 2;
    }
    if (kiln_abi_version() != KILN_ABI_VERSION) {
        fprintf(stderr, "libkiln has ABI %u, expected %u\n", (unsigned)kiln_abi_version(),
                (unsigned)KILN_ABI_VERSION);
        return 1;
    }

    kiln_model_options options = {.size = sizeof options, .device = "auto"};
    kiln_model *model = NULL;
    if (kiln_model_open(argv[1], &options, &model) != KILN_STATUS_OK) {
        return fail("opening the model");
    }

    kiln_request request = {.size = sizeof request, .prompt = argv[2]};
    if (argc > 7) {
        request.width = (uint32_t)atoi(argv[4]);
        request.height = (uint32_t)atoi(argv[5]);
        request.steps = (uint32_t)atoi(argv[6]);
        request.seed = strtoull(argv[7], NULL, 10);
        request.has_seed = 1;
    }
    kiln_callbacks callbacks = {.size = sizeof callbacks, .progress = show_progress, .log = show_message};
    kiln_images *images = NULL;
    int code = 0;
    if (kiln_generate(model, &request, &callbacks, NULL, &images) != KILN_STATUS_OK) {
        code = fail("generating");
    } else if (kiln_image_save(images, 0, argv[3]) != KILN_STATUS_OK) {
        code = fail("saving");
    } else {
        kiln_image image = {.size = sizeof image};
        kiln_images_get(images, 0, &image);
        printf("%ux%u, seed %llu\n", (unsigned)image.width, (unsigned)image.height, (unsigned long long)image.seed);
    }
    kiln_images_free(images);
    kiln_model_free(model);
    return code;
}
