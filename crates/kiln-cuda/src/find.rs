//! Where the libraries of CUDA are.
//!
//! They come from the driver (libcuda), a CUDA toolkit or the `nvidia-*` packages of a Python installation, and none of
//! them has to be on the loader's path. Nothing is linked: each is looked for when it is first needed.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Error, Result};

/// A library Kiln uses on NVIDIA GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The driver.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Convolutions and attention.
    Cudnn,
}

/// Versions in use, the newest first; the number is part of the file's name.
const MAJORS: [u32; 2] = [13, 12];

impl Wanted {
    /// All of them, in the order in which they are reported.
    pub const ALL: [Wanted; 4] = [Wanted::Driver, Wanted::Nvrtc, Wanted::CublasLt, Wanted::Cudnn];

    /// The name people know it by.
    pub const fn name(self) -> &'static str {
        match self {
            Wanted::Driver => "the NVIDIA driver (libcuda)",
            Wanted::Nvrtc => "NVRTC (libnvrtc)",
            Wanted::CublasLt => "cuBLASLt (libcublasLt)",
            Wanted::Cudnn => "cuDNN (libcudnn)",
        }
    }

    /// What to do when it is missing.
    pub const fn install(self) -> &'static str {
        match self {
            Wanted::Driver => "install NVIDIA's driver, version 550 or newer",
            Wanted::Nvrtc => {
                "install CUDA 12.4 or newer, or `pip install nvidia-cuda-nvrtc`, or name its folder in KILN_CUDA_PATH"
            }
            Wanted::CublasLt => {
                "install CUDA 12.4 or newer, or `pip install nvidia-cublas`, or name its folder in KILN_CUDA_PATH; \
                 without it, matrix products use Kiln's own kernels and take longer"
            }
            Wanted::Cudnn => "optional and not used yet: `pip install nvidia-cudnn-cu13`",
        }
    }

    /// File names, the best first.
    pub(crate) fn files(self) -> Vec<String> {
        if cfg!(windows) {
            return match self {
                Wanted::Driver => vec!["nvcuda.dll".into()],
                Wanted::Nvrtc => MAJORS.map(|m| format!("nvrtc64_{m}0_0.dll")).into(),
                Wanted::CublasLt => MAJORS.map(|m| format!("cublasLt64_{m}.dll")).into(),
                Wanted::Cudnn => vec!["cudnn64_9.dll".into()],
            };
        }
        match self {
            Wanted::Driver => vec!["libcuda.so.1".into(), "libcuda.so".into()],
            Wanted::Nvrtc => MAJORS.map(|m| format!("libnvrtc.so.{m}")).into(),
            Wanted::CublasLt => MAJORS.map(|m| format!("libcublasLt.so.{m}")).into(),
            Wanted::Cudnn => vec!["libcudnn.so.9".into()],
        }
    }

    /// Folders of Python's `nvidia` package that hold it.
    fn wheel_folders(self) -> &'static [&'static str] {
        match self {
            Wanted::Driver => &[],
            Wanted::Nvrtc => &["cu13", "cuda_nvrtc"],
            Wanted::CublasLt => &["cu13", "cublas"],
            Wanted::Cudnn => &["cudnn"],
        }
    }
}

/// A library in this process.
pub(crate) struct Loaded {
    pub library: Library,
    pub path: PathBuf,
}

/// Loads a library from the first place that has it.
pub(crate) fn load(wanted: Wanted) -> Result<Loaded> {
    let mut unusable = None;
    for path in candidates(wanted, &Places::of_this_process()) {
        // SAFETY: NVIDIA's libraries do nothing at load time that this process has to prepare for.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok(Loaded { library, path: settle(path) }),
            // A bare name that the loader does not know is no news; a file that is there and does not load is.
            Err(e) if path.is_absolute() => {
                unusable.get_or_insert(Error::Unusable { path, what: e.to_string() });
            }
            Err(_) => {}
        }
    }
    Err(unusable.unwrap_or(Error::Missing { library: wanted.name(), install: wanted.install() }))
}

/// The whole path of a library that the loader found by its name.
fn settle(path: PathBuf) -> PathBuf {
    if path.is_absolute() {
        return path;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let stem = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let found = maps.lines().filter_map(|line| line.split_once('/')).map(|(_, rest)| format!("/{rest}"));
    // libcuda.so.1 is mapped under its full version, so the name is a beginning.
    found.map(PathBuf::from).find(|p| file_name(p).starts_with(&stem)).unwrap_or(path)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What the search depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// Folders a person named; they come before all others.
    pub named: Vec<PathBuf>,
    /// CUDA toolkits.
    pub toolkits: Vec<PathBuf>,
    /// Python's folders of packages.
    pub packages: Vec<PathBuf>,
}

impl Places {
    fn of_this_process() -> Places {
        let list = |name: &str| -> Vec<PathBuf> { env::var_os(name).map(|v| split(&v)).unwrap_or_default() };
        let mut toolkits = [list("CUDA_HOME"), list("CUDA_PATH"), list("CUDA_ROOT")].concat();
        toolkits.push("/usr/local/cuda".into());
        toolkits.extend(versions_in(Path::new("/usr/local"), "cuda-"));
        toolkits.push("/opt/cuda".into());
        toolkits.extend(versions_in(Path::new("C:\\Program Files\\NVIDIA GPU Computing Toolkit\\CUDA"), "v"));
        Places { named: list("KILN_CUDA_PATH"), toolkits, packages: python_packages() }
    }
}

fn split(value: &OsString) -> Vec<PathBuf> {
    env::split_paths(value).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// Folders whose name begins so, the highest first.
fn versions_in(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|e| e.path()).filter(|p| file_name(p).starts_with(prefix)).collect();
    found.sort();
    found.reverse();
    found
}

/// `site-packages` of the active environment, of the Python on the path, of the user and of the system.
fn python_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(env::var_os).map(PathBuf::from).collect();
    for folder in env::var_os("PATH").map(|path| split(&path)).unwrap_or_default() {
        // The folder above `bin` of an environment, through the links that lead there.
        let python = folder.join("python3");
        if python.is_file()
            && let Some(root) = folder.parent()
        {
            roots.push(root.to_owned());
        }
    }
    if let Some(home) = env::var_os("HOME") {
        roots.push(PathBuf::from(home).join(".local"));
    }
    roots.extend(["/usr", "/usr/local"].map(PathBuf::from));
    let mut packages = Vec::new();
    for root in roots {
        packages.push(root.join("Lib").join("site-packages"));
        for lib in ["lib", "lib64"] {
            for python in versions_in(&root.join(lib), "python3") {
                packages.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
            }
        }
    }
    packages.dedup();
    packages
}

/// Every path to try, in order: named folders, the loader's own, toolkits, Python packages.
pub(crate) fn candidates(wanted: Wanted, places: &Places) -> Vec<PathBuf> {
    let files = wanted.files();
    let mut folders = Vec::new();
    if wanted == Wanted::Driver {
        folders.extend(["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"].map(PathBuf::from));
    }
    for toolkit in &places.toolkits {
        folders.extend(["lib64", "targets/x86_64-linux/lib", "bin", "bin/x64"].map(|sub| toolkit.join(sub)));
    }
    for packages in &places.packages {
        for folder in wanted.wheel_folders() {
            let folder = packages.join("nvidia").join(folder);
            folders.extend(["lib", "bin", "bin/x86_64"].map(|sub| folder.join(sub)));
        }
    }
    let in_folders = |folders: &[PathBuf]| -> Vec<PathBuf> {
        let paths = folders.iter().flat_map(|folder| files.iter().map(|file| folder.join(file)));
        paths.filter(|path| path.is_file()).collect()
    };
    let by_name = files.iter().map(PathBuf::from).collect();
    [in_folders(&places.named), by_name, in_folders(&folders)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(folder: &Path, file: &str) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let path = folder.join(file);
        std::fs::write(&path, b"not a library").unwrap();
        path
    }

    #[test]
    fn named_folders_come_first_then_the_loader_then_toolkits_then_wheels() {
        let root = tempfile::tempdir().unwrap();
        let file = Wanted::Nvrtc.files()[0].clone();
        let named = touch(&root.path().join("mine"), &file);
        let toolkit = touch(&root.path().join("cuda/lib64"), &file);
        let wheel = touch(&root.path().join("site/nvidia/cuda_nvrtc/lib"), &file);
        let places = Places {
            named: vec![root.path().join("mine")],
            toolkits: vec![root.path().join("cuda")],
            packages: vec![root.path().join("site")],
        };
        let found = candidates(Wanted::Nvrtc, &places);
        let at = |path: &Path| found.iter().position(|p| p == path).unwrap();
        assert!(at(&named) < at(Path::new(&file)));
        assert!(at(Path::new(&file)) < at(&toolkit));
        assert!(at(&toolkit) < at(&wheel));
    }

    #[test]
    fn a_newer_library_comes_before_an_older_one_of_the_same_folder() {
        let root = tempfile::tempdir().unwrap();
        let files = Wanted::CublasLt.files();
        let (old, new) = (touch(root.path(), &files[1]), touch(root.path(), &files[0]));
        let places = Places { named: vec![root.path().to_owned()], ..Places::default() };
        assert_eq!(candidates(Wanted::CublasLt, &places)[..2], [new, old]);
    }

    #[test]
    fn folders_without_the_file_are_not_tried() {
        let places = Places { toolkits: vec!["/nowhere".into()], ..Places::default() };
        assert!(candidates(Wanted::Cudnn, &places).iter().all(|path| !path.is_absolute()));
    }
}
