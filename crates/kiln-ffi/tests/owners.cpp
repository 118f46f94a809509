// The C++ header: owners, exceptions from callbacks, cancelling. owners MODEL ends with 0 if all is well.
#include <kiln.hpp>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>

static void check(bool condition, const char *what) {
    if (!condition) {
        std::cerr << what << "; last error: " << kiln_last_error() << '\n';
        std::exit(1);
    }
}

template <class F> static kiln_status status_of(F &&call) {
    try {
        call();
        return KILN_STATUS_OK;
    } catch (const kiln::Error &error) {
        return error.status();
    }
}

int main(int, char **argv) {
    kiln::Model model(argv[1]);
    kiln::Request request("a red fox");
    request.size(64, 64).steps(2).seed(7);
    request.fields.max_tokens = 8;

    int previews = 0;
    kiln::Callbacks callbacks;
    callbacks.preview = [&](const kiln_pixels &) { previews++; };
    const kiln::Images images = model.generate(request, callbacks);
    check(images.size() == 1 && previews > 0, "one image with previews");
    check(images[0].seed == 7 && images.png(0).size() > 100, "seed and PNG");
    check(status_of([&] { images[1]; }) == KILN_STATUS_INVALID_ARGUMENT, "there is no second image");
    const kiln::Signer signer;
    auto file = kiln::Images::default_options();
    file.signer = signer.get();
    check(images.png(0, file).size() > images.png(0).size() + 1000, "a signed file is longer");
    auto options = kiln::Signer::default_options();
    options.key = "none.pem";
    check(status_of([&] { kiln::Signer(options).get(); }) == KILN_STATUS_INVALID_ARGUMENT, "half of a key");

    const kiln::Images json = model.generate_json(
        R"({"prompt":"a red fox","width":64,"height":64,"steps":2,"seed":7,"max_tokens":8})");
    check(std::memcmp(json[0].rgb, images[0].rgb, 3 * 64 * 64) == 0, "JSON gives the same image");

    // Exceptions pass through the library.
    for (auto *where : {"progress", "preview"}) {
        kiln::Callbacks throwing;
        if (std::strcmp(where, "progress") == 0) {
            throwing.progress = [](const kiln_progress &) -> bool { throw std::string("progress"); };
        } else {
            throwing.preview = [](const kiln_pixels &) { throw std::string("preview"); };
        }
        std::string caught;
        try {
            model.generate(request, throwing);
        } catch (const std::string &text) {
            caught = text;
        }
        check(caught == where, where);
    }

    // Pixels and a mask.
    const std::vector<std::uint8_t> pixels(3 * 64 * 64, 128), white(3 * 64 * 64, 255);
    kiln::Request inpaint = request;
    inpaint.init = {kiln::Input::pixels(pixels.data(), 64, 64)};
    inpaint.mask = {kiln::Input::pixels(white.data(), 64, 64)};
    inpaint.fields.strength = 0.5F;
    check(model.generate(inpaint).size() == 1, "inpainting");
    inpaint.loras = {{"/no/such/lora.safetensors", 0.5F}};
    check(status_of([&] { model.generate(inpaint); }) != KILN_STATUS_OK, "a LoRA that is not there");

    const kiln::CancelToken token;
    request.steps(4000);
    std::thread other([token] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        token.cancel();
    });
    check(status_of([&] { model.generate(request, {}, token); }) == KILN_STATUS_CANCELLED, "cancelled");
    other.join();

    kiln::Model moved = std::move(model);
    check(moved.get() != nullptr && model.get() == nullptr, "models move"); // NOLINT
    check(status_of([] { kiln::Model("/no/such/model"); }) == KILN_STATUS_MODEL, "no such model");
    return 0;
}
