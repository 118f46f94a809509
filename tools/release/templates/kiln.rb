class Kiln < Formula
  desc "Text to image with FLUX.2, on a CPU or an NVIDIA GPU"
  homepage "@REPOSITORY@"
  version "@VERSION@"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    depends_on arch: :arm64
    url "@DOWNLOAD@/kiln-@VERSION@-aarch64-apple-darwin.tar.gz"
    sha256 "@aarch64-apple-darwin.tar.gz@"
  end

  on_linux do
    on_intel do
      url "@DOWNLOAD@/kiln-@VERSION@-x86_64-unknown-linux-gnu.tar.gz"
      sha256 "@x86_64-unknown-linux-gnu.tar.gz@"
    end
    on_arm do
      url "@DOWNLOAD@/kiln-@VERSION@-aarch64-unknown-linux-gnu.tar.gz"
      sha256 "@aarch64-unknown-linux-gnu.tar.gz@"
    end
  end

  def install
    bin.install "kiln"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/kiln.bash" => "kiln"
    zsh_completion.install "completions/_kiln"
    fish_completion.install "completions/kiln.fish"
    doc.install "LICENSE-MIT", "LICENSE-APACHE", "THIRD-PARTY.txt", "NOTICE", "kiln.cdx.json"
  end

  service do
    run [opt_bin/"kiln", "serve"]
    keep_alive true
  end

  test do
    system bin/"kiln", "generate", "a red apple", "--steps", "1", "-o", testpath/"apple.png"
    assert_path_exists testpath/"apple.png"
  end
end
