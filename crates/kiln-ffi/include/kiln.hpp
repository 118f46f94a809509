// Kiln's C++ interface: kiln.h with owners, exceptions and std types. C++17, header only.
#ifndef KILN_HPP
#define KILN_HPP

#include <kiln.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kiln {

/// An error of the library: what() says what is wrong, hint() what to do.
class Error : public std::runtime_error {
public:
    Error(kiln_status status, const std::string &message, std::string hint)
        : std::runtime_error(message), status_(status), hint_(std::move(hint)) {}

    kiln_status status() const noexcept { return status_; }
    const std::string &hint() const noexcept { return hint_; }

private:
    kiln_status status_;
    std::string hint_;
};

/// Throws the error of the last call, unless it succeeded.
inline void check(kiln_status status) {
    if (status != KILN_STATUS_OK) {
        throw Error(status, kiln_last_error(), kiln_last_hint());
    }
}

namespace detail {
struct Free {
    void operator()(kiln_model *model) const noexcept { kiln_model_free(model); }
    void operator()(kiln_images *images) const noexcept { kiln_images_free(images); }
    void operator()(kiln_signer *signer) const noexcept { kiln_signer_free(signer); }
    void operator()(kiln_cancel_token *token) const noexcept { kiln_cancel_token_free(token); }
};

/// A structure with its size set and everything else zero.
template <class T> T sized() {
    T value{};
    value.size = sizeof(T);
    return value;
}

/// A text of C: NULL if it is empty.
inline const char *text(const std::string &text) { return text.empty() ? nullptr : text.c_str(); }
} // namespace detail

/// An input image: a file, or pixels that stay alive until the call returns.
struct Input {
    std::string path;
    const std::uint8_t *rgb = nullptr;
    std::uint32_t width = 0;
    std::uint32_t height = 0;
    std::size_t stride = 0;

    static Input file(std::string path) { return Input{std::move(path)}; }
    static Input pixels(const std::uint8_t *rgb, std::uint32_t width, std::uint32_t height, std::size_t stride = 0) {
        return Input{{}, rgb, width, height, stride};
    }

    kiln_input c() const {
        auto input = detail::sized<kiln_input>();
        input.path = detail::text(path);
        input.rgb = rgb;
        input.width = width;
        input.height = height;
        input.stride = stride;
        return input;
    }
};

/// A LoRA and its weight.
struct Lora {
    std::string path;
    float weight = 1.0F;
};

/// What to generate; see kiln_request. Zero and empty are the defaults.
struct Request {
    std::string prompt;
    std::string negative_prompt;
    /// Fields without texts and lists, which come from the members here.
    kiln_request fields = detail::sized<kiln_request>();
    std::vector<Input> references;
    std::vector<Input> init; ///< At most one.
    std::vector<Input> mask; ///< At most one.
    std::vector<Lora> loras;
    std::string vae;
    /// What a weight other than 1 means for a DoRA: "comfyui" or "diffusers"; empty: comfyui.
    std::string dora_rule;
    /// Any other field, as an object in the JSON of `/v1/jobs`.
    std::string json;

    explicit Request(std::string text) : prompt(std::move(text)) {}

    Request &size(std::uint32_t width, std::uint32_t height) {
        fields.width = width;
        fields.height = height;
        return *this;
    }
    Request &steps(std::uint32_t steps) {
        fields.steps = steps;
        return *this;
    }
    Request &seed(std::uint64_t seed) {
        fields.seed = seed;
        fields.has_seed = 1;
        return *this;
    }
    Request &guidance(float guidance) {
        fields.guidance = guidance;
        fields.has_guidance = 1;
        return *this;
    }
    Request &strength(float strength) {
        fields.strength = strength;
        fields.has_strength = 1;
        return *this;
    }
};

/// Cancels calls from any thread. Copies share one token.
class CancelToken {
public:
    CancelToken() : token_(kiln_cancel_token_new(), detail::Free{}) {}
    void cancel() const { check(kiln_cancel(token_.get())); }
    void reset() const { check(kiln_cancel_token_reset(token_.get())); }
    kiln_cancel_token *get() const noexcept { return token_.get(); }

private:
    std::shared_ptr<kiln_cancel_token> token_;
};

/// Called while images are generated. An exception cancels the call, which then throws it.
struct Callbacks {
    std::function<bool(const kiln_progress &)> progress; ///< Returns whether to go on.
    std::function<void(const kiln_pixels &)> preview;
    std::function<void(const char *)> log;
};

/// A key with its certificate, to sign files with. Any thread may use it.
class Signer {
public:
    /// Options with their defaults: the key of `kiln credentials new`.
    static kiln_signer_options default_options() { return detail::sized<kiln_signer_options>(); }

    explicit Signer(const kiln_signer_options &options = default_options()) {
        kiln_signer *signer = nullptr;
        check(kiln_signer_open(&options, &signer));
        signer_.reset(signer);
    }

    const kiln_signer *get() const { return signer_.get(); }

private:
    std::unique_ptr<kiln_signer, detail::Free> signer_;
};

/// The images of a call.
class Images {
public:
    explicit Images(kiln_images *images) : images_(images) {}

    std::size_t size() const { return kiln_images_count(images_.get()); }

    /// Valid as long as this object.
    kiln_image operator[](std::size_t index) const {
        auto image = detail::sized<kiln_image>();
        check(kiln_images_get(images_.get(), index, &image));
        return image;
    }

    /// Options of files with their defaults.
    static kiln_file_options default_options() { return detail::sized<kiln_file_options>(); }

    /// The bytes of a PNG file with the recipe.
    std::vector<std::uint8_t> png(std::size_t index, const kiln_file_options &options = default_options()) const {
        kiln_buffer buffer = {nullptr, 0};
        check(kiln_image_png_with(images_.get(), index, &options, &buffer));
        const std::unique_ptr<kiln_buffer, void (*)(kiln_buffer *)> owner(&buffer, kiln_buffer_free);
        return std::vector<std::uint8_t>(buffer.data, buffer.data + buffer.length);
    }

    void save(std::size_t index, const std::string &path, const kiln_file_options &options = default_options()) const {
        check(kiln_image_save_with(images_.get(), index, path.c_str(), &options));
    }

private:
    std::unique_ptr<kiln_images, detail::Free> images_;
};

/// Where an image file comes from, as JSON with the keys of `kiln verify --json`. `trust`: a file of root certificates, or none.
inline std::string verify(const std::string &path, const std::string &trust = std::string()) {
    kiln_buffer buffer = {nullptr, 0};
    check(kiln_verify(path.c_str(), trust.empty() ? nullptr : trust.c_str(), &buffer));
    const std::unique_ptr<kiln_buffer, void (*)(kiln_buffer *)> owner(&buffer, kiln_buffer_free);
    return std::string(reinterpret_cast<const char *>(buffer.data), buffer.length);
}

/// A model. Several threads may use one: their calls run one after the other.
class Model {
public:
    /// Options with their defaults.
    static kiln_model_options default_options() { return detail::sized<kiln_model_options>(); }

    explicit Model(const std::string &name, const kiln_model_options &options = default_options()) {
        kiln_model *model = nullptr;
        check(kiln_model_open(detail::text(name), &options, &model));
        model_.reset(model);
    }

    Images generate(const Request &request, const Callbacks &callbacks = {}) const {
        return run(request, callbacks, nullptr);
    }
    Images generate(const Request &request, const Callbacks &callbacks, const CancelToken &token) const {
        return run(request, callbacks, token.get());
    }

    /// Generates a request in the JSON of `/v1/jobs`.
    Images generate_json(const std::string &json, const Callbacks &callbacks = {}) const {
        Calls calls{callbacks, nullptr};
        const kiln_callbacks c = calls.c();
        kiln_images *images = nullptr;
        const kiln_status status = kiln_generate_json(model_.get(), json.c_str(), nullptr, 0, &c, nullptr, &images);
        return calls.finish(status, images);
    }

    kiln_model *get() const noexcept { return model_.get(); }

private:
    /// The callbacks of one call, and the exception that one of them threw.
    struct Calls {
        const Callbacks &functions;
        std::exception_ptr thrown;

        template <class F> void guard(F &&function) noexcept {
            try {
                function();
            } catch (...) {
                thrown = std::current_exception();
            }
        }

        kiln_callbacks c() {
            auto callbacks = detail::sized<kiln_callbacks>();
            callbacks.user = this;
            callbacks.progress = [](const kiln_progress *progress, void *user) {
                auto &self = *static_cast<Calls *>(user);
                bool go_on = true;
                if (self.functions.progress && !self.thrown) {
                    self.guard([&] { go_on = self.functions.progress(*progress); });
                }
                return go_on && !self.thrown ? 0 : 1;
            };
            if (functions.preview) {
                callbacks.preview = [](const kiln_pixels *pixels, void *user) {
                    auto &self = *static_cast<Calls *>(user);
                    self.guard([&] { self.functions.preview(*pixels); });
                };
            }
            if (functions.log) {
                callbacks.log = [](const char *message, void *user) {
                    auto &self = *static_cast<Calls *>(user);
                    self.guard([&] { self.functions.log(message); });
                };
            }
            return callbacks;
        }

        Images finish(kiln_status status, kiln_images *images) const {
            Images owned(images);
            if (thrown) {
                std::rethrow_exception(thrown);
            }
            check(status);
            return owned;
        }
    };

    Images run(const Request &request, const Callbacks &callbacks, kiln_cancel_token *token) const {
        const auto c_inputs = [](const std::vector<Input> &inputs) {
            std::vector<kiln_input> all;
            for (const Input &input : inputs) {
                all.push_back(input.c());
            }
            return all;
        };
        const auto references = c_inputs(request.references), init = c_inputs(request.init),
                   mask = c_inputs(request.mask);
        std::vector<kiln_lora> loras;
        for (const Lora &lora : request.loras) {
            auto c = detail::sized<kiln_lora>();
            c.path = lora.path.c_str();
            c.weight = lora.weight;
            c.has_weight = 1;
            loras.push_back(c);
        }
        kiln_request c = request.fields;
        c.prompt = request.prompt.c_str();
        c.negative_prompt = detail::text(request.negative_prompt);
        c.references = references.data();
        c.reference_count = references.size();
        c.init = init.empty() ? nullptr : init.data();
        c.mask = mask.empty() ? nullptr : mask.data();
        c.loras = loras.data();
        c.lora_count = loras.size();
        c.vae = detail::text(request.vae);
        c.dora_rule = detail::text(request.dora_rule);
        c.json = detail::text(request.json);
        Calls calls{callbacks, nullptr};
        const kiln_callbacks c_callbacks = calls.c();
        kiln_images *images = nullptr;
        const kiln_status status = kiln_generate(model_.get(), &c, &c_callbacks, token, &images);
        return calls.finish(status, images);
    }

    std::unique_ptr<kiln_model, detail::Free> model_;
};

} // namespace kiln

#endif // KILN_HPP
