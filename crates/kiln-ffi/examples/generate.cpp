// Generates an image with the C++ interface: generate MODEL PROMPT OUT.png [WIDTH HEIGHT STEPS SEED]
#include <kiln.hpp>

#include <iostream>

int main(int argc, char **argv) {
    if (argc < 4) {
        std::cerr << "usage: " << argv[0] << " MODEL PROMPT OUT.png [WIDTH HEIGHT STEPS SEED]\n";
        return 2;
    }
    try {
        const kiln::Model model(argv[1]);
        kiln::Request request(argv[2]);
        if (argc > 7) {
            const auto number = [&](int i) { return static_cast<std::uint32_t>(std::stoul(argv[i])); };
            request.size(number(4), number(5)).steps(number(6)).seed(std::stoull(argv[7]));
        }
        kiln::Callbacks callbacks;
        callbacks.progress = [](const kiln_progress &progress) {
            std::cerr << "\rstep " << progress.step << " of " << progress.steps << std::flush;
            return true;
        };
        const kiln::Images images = model.generate(request, callbacks);
        images.save(0, argv[3]);
        std::cout << images[0].width << 'x' << images[0].height << ", seed " << images[0].seed << '\n';
    } catch (const kiln::Error &error) {
        std::cerr << error.what() << '\n' << error.hint() << '\n';
        return 1;
    }
}
