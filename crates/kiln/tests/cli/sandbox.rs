//! A temporary folder to run the program in, with a model.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use kiln_golden::{Checkpoint, testdata};
use kiln_image::RgbImage;
use tempfile::TempDir;

/// A working folder, a cache folder and a model.
pub struct Sandbox {
    model: Checkpoint,
    folder: TempDir,
    cache: TempDir,
}

/// The exit code and the output of a run.
pub struct RunOutput {
    pub code: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl Sandbox {
    pub fn new() -> Sandbox {
        Sandbox::with_model("klein")
    }

    pub fn with_model(name: &str) -> Sandbox {
        Sandbox::with_checkpoint(Checkpoint::assemble(&testdata(), name).unwrap())
    }

    /// With dev and its text encoder.
    pub fn with_dev() -> Sandbox {
        Sandbox::with_checkpoint(Checkpoint::assemble(&testdata().join("dev"), "dev").unwrap())
    }

    fn with_checkpoint(model: Checkpoint) -> Sandbox {
        Sandbox { model, folder: tempfile::tempdir().unwrap(), cache: tempfile::tempdir().unwrap() }
    }

    pub fn model(&self) -> &Path {
        self.model.path()
    }

    /// The program's cache folder.
    pub fn cache(&self) -> &Path {
        self.cache.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, to be run in the sandbox's folder.
    pub fn command(&self, args: &[&str]) -> Command {
        self.command_of(Path::new(env!("CARGO_BIN_EXE_kiln")), args)
    }

    /// Another program, with the environment that Kiln gets.
    pub fn command_of(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        // A process group of its own, which `interrupt` sends to.
        #[cfg(windows)]
        std::os::windows::process::CommandExt::creation_flags(&mut command, 0x200);
        // Hide the user's own models, settings and caches.
        command.env_remove("KILN_MODEL").env_remove("KILN_MODELS").env("XDG_DATA_HOME", self.path("data"));
        command.env("LOCALAPPDATA", self.path("data"));
        command.env("HF_HOME", self.path("data/hf")).env_remove("HF_HUB_CACHE").env_remove("HF_TOKEN");
        command.env("KILN_CONFIG", self.path("config.toml"));
        // Without one, Mesa's Vulkan drivers print an error.
        command.env("XDG_RUNTIME_DIR", self.folder.path());
        command.env("KILN_CACHE_DIR", self.cache.path()).env_remove("KILN_CACHE_MB");
        command
    }

    pub fn kiln(&self, args: &[&str]) -> RunOutput {
        self.command(args).output().unwrap().into()
    }

    /// Runs `kiln generate` with the sandbox's model, small and quick unless the arguments say otherwise.
    pub fn generate(&self, args: &[&str]) -> RunOutput {
        let model = self.model().to_str().unwrap();
        let mut all = vec!["generate", "-m", model, "--max-tokens", "32"];
        for quick in [["-W", "64"], ["-H", "64"], ["-s", "2"]] {
            if !args.contains(&quick[0]) {
                all.extend(quick);
            }
        }
        all.extend(args);
        self.kiln(&all)
    }

    pub fn generate_with_input(&self, args: &[&str], input: &[u8]) -> RunOutput {
        let model = self.model().to_str().unwrap();
        let quick = ["generate", "-m", model, "--max-tokens", "32", "-W", "64", "-H", "64", "-s", "1"];
        let mut command = self.command(&[&quick, args].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        child.wait_with_output().unwrap().into()
    }

    /// Puts the model into the models folder as `klein.toml`, with its transformer as `small.gguf`.
    pub fn fill_models_folder(&self) -> PathBuf {
        let models = self.path("data/kiln/models");
        fs::create_dir_all(models.join("parts")).unwrap();
        for (component, part, to) in [
            ("transformer", "transformer", "small.gguf"),
            ("vae", "vae", "parts/vae.safetensors"),
            ("text_encoder", "text-encoder", "parts/qwen.safetensors"),
        ] {
            let (from, to) = (self.model().join(component), models.join(to));
            self.kiln(&["convert", from.to_str().unwrap(), to.to_str().unwrap(), "--part", part]).ok();
        }
        // The tiny text encoder has a small vocabulary of its own.
        fs::copy(self.model().join("tokenizer/tokenizer.json"), models.join("parts/tokenizer.json")).unwrap();
        let manifest = "transformer = 'small.gguf'\ntext_encoder = 'parts/qwen.safetensors'\n\
                        vae = 'parts/vae.safetensors'\ntokenizer = 'parts/tokenizer.json'\nvariant = 'distilled'\n";
        fs::write(models.join("klein.toml"), manifest).unwrap();
        models
    }

    /// The names in the sandbox's folder, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn image(&self, name: &str) -> RgbImage {
        kiln_image::open(&self.path(name)).unwrap()
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> String {
        fs::write(self.path(name), bytes).unwrap();
        name.to_owned()
    }

    /// Replaces a file of the model. It is removed first: it may be a link to a file of the repository.
    pub fn write_to_model(&self, name: &str, bytes: &[u8]) {
        let path = self.model().join(name);
        self.remove_from_model(name);
        fs::write(path, bytes).unwrap();
    }

    pub fn remove_from_model(&self, name: &str) {
        let path = self.model().join(name);
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else if path.exists() {
            fs::remove_file(path).unwrap();
        }
    }

    /// Changes a value in one of the model's JSON files.
    pub fn edit_model(&self, name: &str, key: &str, value: serde_json::Value) {
        let text = fs::read(self.model().join(name)).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        json[key] = value;
        self.write_to_model(name, json.to_string().as_bytes());
    }
}

impl From<Output> for RunOutput {
    fn from(output: Output) -> RunOutput {
        RunOutput {
            code: output.status.code().unwrap_or(-1),
            out: output.stdout,
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl RunOutput {
    /// Asserts success.
    #[track_caller]
    pub fn ok(self) -> RunOutput {
        assert_eq!(self.code, 0, "{}", self.err);
        self
    }

    /// Asserts failure with this exit code and an error message that contains all `words`. Paths in them have `/`.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{}", self.err);
        assert!(self.err.contains("error: "), "{}", self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        self.is_complete_error();
        for word in words {
            let has_path = || cfg!(windows) && self.err.replace('\\', "/").contains(word);
            assert!(self.err.contains(word) || has_path(), "`{word}` is missing in:\n{}", self.err);
        }
    }

    /// Asserts that an error says what to do, that no name in it is empty, and that the table of errors has it.
    #[track_caller]
    fn is_complete_error(&self) {
        let start = self.err.find("error: ").unwrap_or(0);
        let error = &self.err[start..];
        // The parser of the command line has its own hints.
        let says_what_to_do = error.contains("\nhint: ") || error.contains("try '--help'");
        assert!(says_what_to_do, "an error without a hint:\n{error}");
        assert!(!error.contains(" `` ") && !error.contains("``:"), "an empty name:\n{error}");
        // Other systems and builds have errors of their own.
        #[cfg(all(target_os = "linux", feature = "ember", feature = "serve"))]
        crate::error_table::check(error);
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }

    /// Standard output as JSON lines.
    pub fn events(&self) -> Vec<serde_json::Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Sends Ctrl-C to a program; on Windows Ctrl-Break, which can be sent to one program alone.
pub fn interrupt(child: &Child) {
    #[cfg(unix)]
    signal(child, "-INT");
    #[cfg(windows)]
    kiln_windows::console::send_break(child.id()).unwrap();
}

#[cfg(unix)]
pub fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
}

/// Makes a folder appear at another path: by a link, or where only administrators may make one, by a copy.
pub fn link_folder(from: &Path, to: &Path) {
    #[cfg(unix)]
    std::os::unix::fs::symlink(from, to).unwrap();
    #[cfg(windows)]
    {
        fs::create_dir_all(to).unwrap();
        for path in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
            let to = to.join(path.file_name().unwrap());
            if path.is_dir() {
                link_folder(&path, &to);
            } else {
                fs::copy(&path, to).unwrap();
            }
        }
    }
}

/// A file of the golden set.
pub fn golden(name: &str) -> String {
    testdata().join("reference").join(name).canonicalize().unwrap().to_str().unwrap().to_owned()
}

/// The largest difference between two images, in levels.
#[track_caller]
pub fn max_difference(a: &RgbImage, b: &RgbImage) -> u8 {
    assert_eq!((a.width(), a.height()), (b.width(), b.height()));
    a.pixels().iter().zip(b.pixels()).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0)
}

/// An image with distinct pixels.
pub fn pattern(width: u32, height: u32) -> RgbImage {
    let pixel = |i: u32| {
        let (x, y) = (i % width, i / width);
        [(x * 255 / width) as u8, (y * 255 / height) as u8, ((x * 7 + y * 13) % 256) as u8]
    };
    RgbImage::new(width, height, (0..width * height).flat_map(pixel).collect()).unwrap()
}

pub fn png(image: &RgbImage) -> Vec<u8> {
    kiln_image::encode(image, kiln_image::Format::Png, None).unwrap()
}
