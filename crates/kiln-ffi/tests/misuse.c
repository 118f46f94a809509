/* Wrong uses of the library, and right ones that are unusual: misuse MODEL. Ends with 0 if each is answered well. */
#include <kiln.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, kiln_last_error()); \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)
#define FAILS(call, expected, text)                     \
    do {                                                \
        CHECK((call) == (expected));                    \
        CHECK(kiln_last_status() == (expected));        \
        CHECK(strstr(kiln_last_error(), text) != NULL); \
    } while (0)

static const kiln_status INVALID = KILN_STATUS_INVALID_ARGUMENT;

static kiln_request small(void) {
    kiln_request request = {.size = sizeof request, .prompt = "a red fox", .width = 64, .height = 64, .steps = 2};
    request.seed = 7;
    request.has_seed = 1;
    request.max_tokens = 8;
    return request;
}

static void null_arguments(kiln_model *model) {
    kiln_request request = small();
    kiln_images *images = NULL;
    FAILS(kiln_model_open("ember", NULL, NULL), INVALID, "is NULL");
    FAILS(kiln_generate(NULL, &request, NULL, NULL, &images), INVALID, "the kiln_model is NULL");
    FAILS(kiln_generate(model, NULL, NULL, NULL, &images), INVALID, "the kiln_request is NULL");
    FAILS(kiln_generate(model, &request, NULL, NULL, NULL), INVALID, "NULL");
    FAILS(kiln_generate_json(model, NULL, NULL, 0, NULL, NULL, &images), INVALID, "NULL");
    FAILS(kiln_model_load(NULL, NULL, NULL), INVALID, "NULL");
    FAILS(kiln_cancel(NULL), INVALID, "NULL");
    FAILS(kiln_images_get(NULL, 0, NULL), INVALID, "NULL");
    FAILS(kiln_image_png(NULL, 0, NULL), INVALID, "NULL");
    FAILS(kiln_image_save(NULL, 0, NULL), INVALID, "NULL");
    CHECK(kiln_images_count(NULL) == 0);
    CHECK(kiln_model_free(NULL) == KILN_STATUS_OK && kiln_images_free(NULL) == KILN_STATUS_OK);
    CHECK(kiln_cancel_token_free(NULL) == KILN_STATUS_OK);
    kiln_buffer_free(NULL);
}

static void wrong_values(kiln_model *model) {
    kiln_images *images = (kiln_images *)&images;
    kiln_request request = small();
    request.size = 0;
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "the size of the kiln_request is 0");
    CHECK(images == NULL && strstr(kiln_last_hint(), "sizeof(kiln_request)") != NULL);
    request.size = (size_t)-1;
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "the size of the kiln_request is");
    request = small();
    request.reference_count = 2;
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "array of 2 kiln_input is NULL");
    kiln_input inputs[2] = {{.size = sizeof inputs[0]}, {.size = sizeof inputs[0]}};
    request.references = inputs;
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "neither a path nor pixels");
    const uint8_t pixel[3] = {1, 2, 3};
    inputs[0].rgb = pixel;
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "0×0 pixels");
    inputs[0].path = "/no/such/file.png";
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "a path and pixels");
    inputs[0].rgb = NULL;
    request.reference_count = 1;
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), KILN_STATUS_IO, "/no/such/file.png");
    inputs[1].size = 8;
    request.reference_count = 2;
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "the size of kiln_input number 1 is 8");
    request = small();
    request.prompt = "\xff";
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "not UTF-8");
    request = small();
    request.upscale = 3;
    CHECK(kiln_generate(model, &request, NULL, NULL, &images) == INVALID);
    request = small();
    request.json = "{\"promt\":1}";
    FAILS(kiln_generate(model, &request, NULL, NULL, &images), INVALID, "unknown field `promt`");
    FAILS(kiln_generate_json(model, "{\"promt\":1}", NULL, 0, NULL, NULL, &images), INVALID, "unknown field `promt`");
    FAILS(kiln_generate_json(model, "{\"model\":\"x\"}", NULL, 0, NULL, NULL, &images), INVALID, "names a model");
    kiln_model *other = NULL;
    FAILS(kiln_model_open("/no/such/model", NULL, &other), KILN_STATUS_MODEL, "/no/such/model");
    kiln_model_options options = {.size = sizeof options, .device = "toaster"};
    FAILS(kiln_model_open("ember", &options, &other), INVALID, "toaster");
    options.device = NULL;
    options.dtype = "f12";
    FAILS(kiln_model_open("ember", &options, &other), INVALID, "f12");
    options.dtype = NULL;
    options.threads = 4000000000u;
    FAILS(kiln_model_open("ember", &options, &other), INVALID, "4000000000");
    CHECK(other == NULL);
}

/* Zero is the default, unless a flag says that it is meant. */
static void zeros(kiln_model *model) {
    static const uint8_t black[3 * 64 * 64];
    const kiln_input init = {.size = sizeof init, .rgb = black, .width = 64, .height = 64};
    kiln_images *images = NULL, *kept = NULL;
    kiln_image image = {.size = sizeof image}, unchanged = {.size = sizeof unchanged};
    kiln_request request = small();
    request.init = &init;
    request.has_seed = 0;
    CHECK(kiln_generate(model, &request, NULL, NULL, &images) == KILN_STATUS_OK);
    CHECK(kiln_images_get(images, 0, &image) == KILN_STATUS_OK && image.seed == 7);
    request.has_strength = 1;
    CHECK(kiln_generate(model, &request, NULL, NULL, &kept) == KILN_STATUS_OK);
    CHECK(kiln_images_get(kept, 0, &unchanged) == KILN_STATUS_OK);
    CHECK(memcmp(image.rgb, unchanged.rgb, sizeof black) != 0);
    CHECK(kiln_images_free(images) == KILN_STATUS_OK && kiln_images_free(kept) == KILN_STATUS_OK);
    request.json = "{\"seed\": 0, \"schedule\": \"power\", \"strength\": 0.5}";
    CHECK(kiln_generate(model, &request, NULL, NULL, &images) == KILN_STATUS_OK);
    CHECK(kiln_images_get(images, 0, &image) == KILN_STATUS_OK && image.seed == 0);
    CHECK(strstr(image.recipe, "\"schedule\":\"power\"") != NULL && strstr(image.recipe, "\"strength\":0.5") != NULL);
    CHECK(kiln_images_free(images) == KILN_STATUS_OK);
}

/* A program that was compiled with an older or a newer header. */
static void other_versions(kiln_model *model) {
    struct {
        kiln_request request;
        char more[16];
    } newer = {.request = small()};
    newer.request.size = sizeof newer;
    kiln_images *images = NULL;
    CHECK(kiln_generate(model, &newer.request, NULL, NULL, &images) == KILN_STATUS_OK);
    kiln_image image;
    memset(&image, 0xab, sizeof image);
    image.size = offsetof(kiln_image, seed);
    CHECK(kiln_images_get(images, 0, &image) == KILN_STATUS_OK);
    CHECK(image.width == 64 && image.height == 64 && image.has_seed == 0xab && image.size == offsetof(kiln_image, seed));
    FAILS(kiln_images_get(images, 1, &image), INVALID, "there is no image 1");
    CHECK(kiln_images_free(images) == KILN_STATUS_OK);
    newer.more[3] = 1;
    FAILS(kiln_generate(model, &newer.request, NULL, NULL, &images), INVALID, "does not know");
    kiln_request older = small();
    older.size = offsetof(kiln_request, upscale);
    older.upscale = 77;
    older.reference_count = 99;
    CHECK(kiln_generate(model, &older, NULL, NULL, &images) == KILN_STATUS_OK);
    CHECK(kiln_images_free(images) == KILN_STATUS_OK);
}

static void freed_handles(const char *path) {
    kiln_model *model = NULL;
    CHECK(kiln_model_open(path, NULL, &model) == KILN_STATUS_OK);
    kiln_request request = small();
    kiln_images *images = NULL;
    CHECK(kiln_generate(model, &request, NULL, NULL, &images) == KILN_STATUS_OK);
    FAILS(kiln_images_free((kiln_images *)model), INVALID, "this is no kiln_images");
    CHECK(kiln_model_free(model) == KILN_STATUS_OK);
    FAILS(kiln_model_free(model), INVALID, "was freed");
    kiln_images *none = NULL;
    FAILS(kiln_generate(model, &request, NULL, NULL, &none), INVALID, "was freed");
    kiln_image image = {.size = sizeof image};
    CHECK(kiln_images_get(images, 0, &image) == KILN_STATUS_OK && image.seed == 7 && image.has_seed == 1);
    CHECK(strstr(image.recipe, "a red fox") != NULL);
    kiln_buffer buffer;
    CHECK(kiln_image_png(images, 0, &buffer) == KILN_STATUS_OK && memcmp(buffer.data, "\x89PNG", 4) == 0);
    kiln_buffer_free(&buffer);
    kiln_buffer_free(&buffer);
    CHECK(buffer.data == NULL);
    FAILS(kiln_image_save(images, 0, "/no/such/folder/out.png"), KILN_STATUS_IO, "/no/such/folder");
    CHECK(kiln_image_save(images, 0, "out.xyz") == INVALID);
    CHECK(kiln_images_free(images) == KILN_STATUS_OK);
    FAILS(kiln_images_free(images), INVALID, "was freed");
    FAILS(kiln_images_get(images, 0, &image), INVALID, "was freed");
}

/* The folder of `kiln credentials new` has a key; "text.pem" is none. */
static void signers(kiln_model *model) {
    kiln_signer *signer = (kiln_signer *)&signer;
    FAILS(kiln_signer_open(NULL, NULL), INVALID, "the pointer for the kiln_signer is NULL");
    kiln_signer_options options = {.size = sizeof options, .key = "text.pem"};
    FAILS(kiln_signer_open(&options, &signer), INVALID, "a key needs its certificate");
    CHECK(signer == NULL);
    options.certificate = "text.pem";
    FAILS(kiln_signer_open(&options, &signer), INVALID, "has no private key");
    options.key = "none.pem";
    FAILS(kiln_signer_open(&options, &signer), KILN_STATUS_IO, "none.pem");
    options = (kiln_signer_options){.size = sizeof options, .timestamp_url = "http://127.0.0.1:1/"};
    FAILS(kiln_signer_open(&options, &signer), KILN_STATUS_IO, "no time stamp");
    options = (kiln_signer_options){.size = sizeof options, .producer = "A Service"};
    CHECK(kiln_signer_open(&options, &signer) == KILN_STATUS_OK);
    kiln_request request = small();
    kiln_images *images = NULL;
    CHECK(kiln_generate(model, &request, NULL, NULL, &images) == KILN_STATUS_OK);
    kiln_buffer plain, signed_file;
    CHECK(kiln_image_png(images, 0, &plain) == KILN_STATUS_OK);
    kiln_file_options file = {.size = sizeof file, .signer = signer};
    CHECK(kiln_image_png_with(images, 0, &file, &signed_file) == KILN_STATUS_OK);
    /* Right behind the header. */
    CHECK(memcmp(signed_file.data + 37, "caBX", 4) == 0 && memcmp(plain.data + 37, "caBX", 4) != 0);
    CHECK(signed_file.length > plain.length + 1000);
    kiln_buffer_free(&signed_file);
    CHECK(kiln_image_png_with(images, 0, NULL, &signed_file) == KILN_STATUS_OK);
    CHECK(signed_file.length == plain.length && memcmp(signed_file.data, plain.data, plain.length) == 0);
    kiln_buffer_free(&signed_file);
    kiln_buffer_free(&plain);
    CHECK(kiln_image_save_with(images, 0, "signed.webp", &file) == KILN_STATUS_OK);
    file.signer = (kiln_signer *)images;
    FAILS(kiln_image_save_with(images, 0, "a.png", &file), INVALID, "this is no kiln_signer");
    kiln_buffer json;
    CHECK(kiln_verify("signed.webp", NULL, &json) == KILN_STATUS_OK);
    CHECK(json.data[0] == '{' && json.data[json.length - 1] == '}');
    kiln_buffer_free(&json);
    FAILS(kiln_verify("missing.png", NULL, &json), KILN_STATUS_IO, "missing.png");
    CHECK(json.data == NULL);
    FAILS(kiln_verify("signed.webp", "signed.webp", &json), INVALID, "has no certificate");
    FAILS(kiln_verify(NULL, NULL, &json), INVALID, "the path is NULL");
    FAILS(kiln_verify("signed.webp", NULL, NULL), INVALID, "the kiln_buffer is NULL");
    CHECK(kiln_signer_free(signer) == KILN_STATUS_OK && kiln_signer_free(NULL) == KILN_STATUS_OK);
    file.signer = signer;
    FAILS(kiln_image_save_with(images, 0, "a.png", &file), INVALID, "was freed");
    CHECK(kiln_images_free(images) == KILN_STATUS_OK);
}

/* Files with options. */
static void files(kiln_model *model) {
    kiln_request request = small();
    kiln_images *images = NULL;
    CHECK(kiln_generate(model, &request, NULL, NULL, &images) == KILN_STATUS_OK);
    kiln_file_options file = {.size = sizeof file, .watermark = "0123abcd", .quality = 90, .no_recipe = 1};
    CHECK(kiln_image_save_with(images, 0, "watermarked.jpg", &file) == KILN_STATUS_OK);
    CHECK(kiln_image_save_with(images, 0, "watermarked.png", &file) == KILN_STATUS_OK);
    CHECK(kiln_image_save_with(images, 0, "plain.png", NULL) == KILN_STATUS_OK);
    file.no_ai_mark = 1;
    file.watermark = NULL;
    CHECK(kiln_image_save_with(images, 0, "bare.jpg", &file) == KILN_STATUS_OK);
    file.watermark = "no digits";
    FAILS(kiln_image_save_with(images, 0, "a.png", &file), INVALID, "8 hexadecimal digits");
    file = (kiln_file_options){.size = sizeof file, .quality = 101};
    FAILS(kiln_image_save_with(images, 0, "a.png", &file), INVALID, "the quality is 101");
    file.size = 3;
    FAILS(kiln_image_save_with(images, 0, "a.png", &file), INVALID, "the size of the kiln_file_options is 3");
    CHECK(kiln_images_free(images) == KILN_STATUS_OK);
}

struct seen {
    kiln_model *model;
    kiln_cancel_token *token;
    int reports, previews, refused, cancel_at;
    float fraction;
};

static int on_progress(const kiln_progress *progress, void *user) {
    struct seen *seen = user;
    CHECK(progress->size == sizeof *progress && progress->fraction >= 0 && progress->fraction <= 1);
    seen->fraction = progress->fraction;
    if (seen->reports++ == 0) {
        kiln_request request = small();
        kiln_images *images = NULL;
        FAILS(kiln_generate(seen->model, &request, NULL, NULL, &images), KILN_STATUS_REENTRY, "callback");
        FAILS(kiln_model_load(seen->model, NULL, NULL), KILN_STATUS_REENTRY, "callback");
        seen->refused = 1;
    }
    if (progress->phase == KILN_PHASE_STEPS && seen->cancel_at == 1) {
        CHECK(kiln_cancel(seen->token) == KILN_STATUS_OK);
    }
    return progress->phase == KILN_PHASE_STEPS && seen->cancel_at == 2;
}

static void on_preview(const kiln_pixels *pixels, void *user) {
    struct seen *seen = user;
    CHECK(pixels->width > 0 && pixels->height > 0);
    volatile uint8_t last = pixels->rgb[3 * (size_t)pixels->width * pixels->height - 1];
    (void)last;
    seen->previews++;
    kiln_request request = small();
    kiln_images *images = NULL;
    FAILS(kiln_generate(seen->model, &request, NULL, NULL, &images), KILN_STATUS_REENTRY, "callback");
}

static void callbacks_and_cancel(kiln_model *model) {
    struct seen seen = {.model = model, .token = kiln_cancel_token_new()};
    kiln_callbacks callbacks = {.size = sizeof callbacks, .user = &seen, .progress = on_progress, .preview = on_preview};
    kiln_request request = small();
    kiln_images *images = NULL;
    CHECK(kiln_generate(model, &request, &callbacks, seen.token, &images) == KILN_STATUS_OK);
    CHECK(seen.reports > 2 && seen.previews > 0 && seen.refused && seen.fraction > 0.5);
    CHECK(kiln_images_free(images) == KILN_STATUS_OK);
    for (seen.cancel_at = 1; seen.cancel_at <= 2; seen.cancel_at++) {
        FAILS(kiln_generate(model, &request, &callbacks, seen.token, &images), KILN_STATUS_CANCELLED, "cancelled");
        CHECK(images == NULL);
        CHECK(kiln_cancel_token_reset(seen.token) == KILN_STATUS_OK);
    }
    CHECK(kiln_cancel(seen.token) == KILN_STATUS_OK);
    FAILS(kiln_generate(model, &request, NULL, seen.token, &images), KILN_STATUS_CANCELLED, "cancelled");
    CHECK(kiln_cancel_token_free(seen.token) == KILN_STATUS_OK);
    FAILS(kiln_cancel(seen.token), INVALID, "was freed");
    FAILS(kiln_generate(model, &request, NULL, seen.token, &images), INVALID, "was freed");
    callbacks.size = 1;
    FAILS(kiln_generate(model, &request, &callbacks, NULL, &images), INVALID, "kiln_callbacks");
}

/* Pixels in memory, a request in JSON, several images. */
static void inputs_and_batches(kiln_model *model) {
    uint8_t pixels[80][100 * 3 + 7];
    for (size_t y = 0; y < 80; y++) {
        for (size_t x = 0; x < sizeof pixels[0]; x++) {
            pixels[y][x] = (uint8_t)(x * y);
        }
    }
    kiln_input input = {.size = sizeof input, .rgb = pixels[0], .width = 100, .height = 80, .stride = sizeof pixels[0]};
    kiln_request request = small();
    request.references = &input;
    request.reference_count = 1;
    request.n = 2;
    kiln_images *images = NULL, *others = NULL;
    CHECK(kiln_generate(model, &request, NULL, NULL, &images) == KILN_STATUS_OK);
    CHECK(kiln_images_count(images) == 2);
    const char *json = "{\"prompt\":\"a red fox\",\"width\":64,\"height\":64,\"steps\":2,\"seed\":8,\"max_tokens\":8,"
                       "\"references\":[\"input:0\"]}";
    CHECK(kiln_generate_json(model, json, &input, 1, NULL, NULL, &others) == KILN_STATUS_OK);
    kiln_image second = {.size = sizeof second}, other = {.size = sizeof other};
    CHECK(kiln_images_get(images, 1, &second) == KILN_STATUS_OK && second.seed == 8);
    CHECK(kiln_images_get(others, 0, &other) == KILN_STATUS_OK && other.computed_steps == 2);
    CHECK(memcmp(second.rgb, other.rgb, 3 * 64 * 64) == 0);
    CHECK(strstr(other.recipe, "input:0") != NULL);
    CHECK(kiln_images_free(images) == KILN_STATUS_OK && kiln_images_free(others) == KILN_STATUS_OK);
    FAILS(kiln_generate_json(model, json, NULL, 0, NULL, NULL, &others), KILN_STATUS_IO, "input:0");
}

static int stop_in_queue(const kiln_progress *progress, void *user) {
    (void)user;
    return progress->phase == KILN_PHASE_QUEUE;
}

static void *wait_in_queue(void *model) {
    kiln_callbacks callbacks = {.size = sizeof callbacks, .progress = stop_in_queue};
    kiln_request request = small();
    kiln_images *images = NULL;
    FAILS(kiln_generate(model, &request, &callbacks, NULL, &images), KILN_STATUS_CANCELLED, "cancelled");
    return NULL;
}

static int start_another(const kiln_progress *progress, void *user) {
    if (progress->phase == KILN_PHASE_STEPS && progress->step == 1) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, wait_in_queue, user) == 0 && pthread_join(thread, NULL) == 0);
        return 1;
    }
    return 0;
}

/* A call that waits for another one can be cancelled. */
static void cancel_in_queue(kiln_model *model) {
    kiln_callbacks callbacks = {.size = sizeof callbacks, .user = model, .progress = start_another};
    kiln_request request = small();
    kiln_images *images = NULL;
    CHECK(kiln_generate(model, &request, &callbacks, NULL, &images) == KILN_STATUS_CANCELLED);
}

struct thread {
    kiln_model *model;
    unsigned seed;
    unsigned char first[12];
};

static void *in_thread(void *argument) {
    struct thread *thread = argument;
    CHECK(*kiln_last_error() == '\0' && kiln_last_status() == KILN_STATUS_OK);
    for (int i = 0; i < 3; i++) {
        kiln_request request = small();
        request.seed = thread->seed;
        kiln_images *images = NULL;
        CHECK(kiln_generate(thread->model, &request, NULL, NULL, &images) == KILN_STATUS_OK);
        kiln_image image = {.size = sizeof image};
        CHECK(kiln_images_get(images, 0, &image) == KILN_STATUS_OK && image.seed == thread->seed);
        CHECK(i == 0 || memcmp(thread->first, image.rgb, sizeof thread->first) == 0);
        memcpy(thread->first, image.rgb, sizeof thread->first);
        CHECK(kiln_images_free(images) == KILN_STATUS_OK);
    }
    FAILS(kiln_cancel(NULL), INVALID, "kiln_cancel_token is NULL");
    return NULL;
}

static void threads(kiln_model *model) {
    FAILS(kiln_images_free((kiln_images *)model), INVALID, "kiln_images");
    pthread_t all[4];
    struct thread arguments[4] = {{.seed = 0}};
    for (unsigned i = 0; i < 4; i++) {
        arguments[i].model = model;
        arguments[i].seed = i;
        CHECK(pthread_create(&all[i], NULL, in_thread, &arguments[i]) == 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    CHECK(memcmp(arguments[0].first, arguments[1].first, sizeof arguments[0].first) != 0);
    CHECK(strstr(kiln_last_error(), "kiln_images") != NULL);
}

int main(int argc, char **argv) {
    CHECK(argc == 2 && kiln_abi_version() == KILN_ABI_VERSION && strlen(kiln_version()) > 4);
    CHECK(*kiln_last_error() == '\0' && *kiln_last_hint() == '\0');
    kiln_model *model = NULL;
    CHECK(kiln_model_open(argv[1], NULL, &model) == KILN_STATUS_OK);
    null_arguments(model);
    wrong_values(model);
    zeros(model);
    other_versions(model);
    freed_handles(argv[1]);
    signers(model);
    files(model);
    callbacks_and_cancel(model);
    inputs_and_batches(model);
    cancel_in_queue(model);
    threads(model);
    CHECK(kiln_model_free(model) == KILN_STATUS_OK);
    return 0;
}
