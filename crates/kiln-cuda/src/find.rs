//! Finds and loads CUDA's libraries.
//!
//! They come from the driver (libcuda), a CUDA toolkit or the `nvidia-*` packages of a Python installation, and need not
//! be on the loader's path. Nothing is linked; each library is searched for when first used.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use kiln_base::NO_NVIDIA;
use libloading::Library;

use crate::error::{Error, Result};

/// A library of CUDA that Kiln uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaLibrary {
    /// The driver.
    Driver,
    /// The kernel compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

/// Supported major versions, newest first; part of the file names.
const MAJORS: [u32; 2] = [13, 12];

impl CudaLibrary {
    /// All libraries, in the order of reports.
    pub const ALL: [CudaLibrary; 3] = [CudaLibrary::Driver, CudaLibrary::Nvrtc, CudaLibrary::CublasLt];

    /// Name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            CudaLibrary::Driver if cfg!(windows) => "the NVIDIA driver (nvcuda.dll)",
            CudaLibrary::Nvrtc if cfg!(windows) => "NVRTC (nvrtc64_*.dll)",
            CudaLibrary::CublasLt if cfg!(windows) => "cuBLASLt (cublasLt64_*.dll)",
            CudaLibrary::Driver => "the NVIDIA driver (libcuda)",
            CudaLibrary::Nvrtc => "NVRTC (libnvrtc)",
            CudaLibrary::CublasLt => "cuBLASLt (libcublasLt)",
        }
    }

    /// What to do if it is missing.
    pub const fn install(self) -> &'static str {
        if let Some(instead) = NO_NVIDIA {
            return instead;
        }
        match self {
            CudaLibrary::Driver => "install NVIDIA's driver, version 550 or newer",
            CudaLibrary::Nvrtc => {
                "it compiles the kernels that this program was built without; take a released program, or build with \
                 tools/cuda/kernels.sh, or install CUDA 12.4 or newer, or `pip install nvidia-cuda-nvrtc`, or set \
                 KILN_CUDA_PATH to its folder"
            }
            CudaLibrary::CublasLt => {
                "install CUDA 12.4 or newer, or `pip install nvidia-cublas`, or set KILN_CUDA_PATH to its folder; \
                 without it, matrix products use Kiln's own kernels: an image takes 5 % longer on compute capability 9.0, \
                 more on others"
            }
        }
    }

    /// File names, most preferred first.
    pub(crate) fn files(self) -> Vec<String> {
        if cfg!(windows) {
            return match self {
                CudaLibrary::Driver => vec!["nvcuda.dll".into()],
                CudaLibrary::Nvrtc => MAJORS.map(|m| format!("nvrtc64_{m}0_0.dll")).into(),
                CudaLibrary::CublasLt => MAJORS.map(|m| format!("cublasLt64_{m}.dll")).into(),
            };
        }
        match self {
            CudaLibrary::Driver => vec!["libcuda.so.1".into(), "libcuda.so".into()],
            CudaLibrary::Nvrtc => MAJORS.map(|m| format!("libnvrtc.so.{m}")).into(),
            CudaLibrary::CublasLt => MAJORS.map(|m| format!("libcublasLt.so.{m}")).into(),
        }
    }

    /// Folders of Python's `nvidia` package that contain it.
    fn wheel_folders(self) -> &'static [&'static str] {
        match self {
            CudaLibrary::Driver => &[],
            CudaLibrary::Nvrtc => &["cu13", "cuda_nvrtc"],
            CudaLibrary::CublasLt => &["cu13", "cublas"],
        }
    }
}

/// A library loaded into this process.
pub(crate) struct LoadedLibrary {
    pub library: Library,
    pub path: PathBuf,
}

/// Loads a library from the first path that works.
pub(crate) fn load(library: CudaLibrary) -> Result<LoadedLibrary> {
    let mut unusable = None;
    let paths = if NO_NVIDIA.is_none() { candidates(library, &SearchPaths::from_env()) } else { Vec::new() };
    for path in paths {
        match open(&path) {
            Ok(library) => return Ok(LoadedLibrary { library, path: resolve_path(path) }),
            // Report files that exist but fail to load, not bare names the loader does not know.
            Err(e) if path.is_absolute() => {
                unusable.get_or_insert(Error::Unusable { path, what: e.to_string() });
            }
            Err(_) => {}
        }
    }
    Err(unusable.unwrap_or(Error::Missing { library: library.name(), install: library.install() }))
}

#[cfg(unix)]
fn open(path: &Path) -> std::result::Result<Library, libloading::Error> {
    // SAFETY: NVIDIA's libraries have no load-time requirements on the process.
    unsafe { Library::new(path) }
}

/// Loads a library of Windows, and those that it needs from its own folder or the system's: never from the current folder, where
/// anyone may have put one of that name.
#[cfg(windows)]
fn open(path: &Path) -> std::result::Result<Library, libloading::Error> {
    use libloading::os::windows::{
        LOAD_LIBRARY_SEARCH_DEFAULT_DIRS, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR, Library as WindowsLibrary,
    };
    let flags = LOAD_LIBRARY_SEARCH_DEFAULT_DIRS | LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR;
    // Windows takes no path with `/` together with these flags, and no relative one.
    let full = std::path::absolute(path);
    let path = full.as_deref().unwrap_or(path);
    // SAFETY: NVIDIA's libraries have no load-time requirements on the process.
    let load = |path: &Path| unsafe { WindowsLibrary::load_with_flags(path, flags) };
    let library = load(path)?;
    // NVRTC loads this one by its name alone, for which Windows takes a library that is there already.
    let beside = versions_in(path.parent().unwrap_or(path), "nvrtc-builtins64_");
    if file_name(path).starts_with("nvrtc64_") {
        beside.iter().filter_map(|path| load(path).ok()).for_each(std::mem::forget);
    }
    Ok(library.into())
}

/// Returns the full path of a library that the loader found by name.
fn resolve_path(path: PathBuf) -> PathBuf {
    if path.is_absolute() {
        return path;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let stem = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let found = maps.lines().filter_map(|line| line.split_once('/')).map(|(_, rest)| format!("/{rest}"));
    // libcuda.so.1 is mapped under its full version, so match the prefix.
    found.map(PathBuf::from).find(|p| file_name(p).starts_with(&stem)).unwrap_or(path)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Folders to search.
#[derive(Clone, Debug, Default)]
pub(crate) struct SearchPaths {
    /// Folders named in `KILN_CUDA_PATH`; searched first.
    pub user: Vec<PathBuf>,
    /// CUDA toolkits.
    pub toolkits: Vec<PathBuf>,
    /// Python's `site-packages` folders.
    pub packages: Vec<PathBuf>,
}

impl SearchPaths {
    fn from_env() -> SearchPaths {
        let list = |name: &str| -> Vec<PathBuf> { env::var_os(name).map(|v| split(&v)).unwrap_or_default() };
        let mut toolkits = [list("CUDA_HOME"), list("CUDA_PATH"), list("CUDA_ROOT")].concat();
        toolkits.push("/usr/local/cuda".into());
        toolkits.extend(versions_in(Path::new("/usr/local"), "cuda-"));
        toolkits.push("/opt/cuda".into());
        toolkits.extend(versions_in(Path::new("C:\\Program Files\\NVIDIA GPU Computing Toolkit\\CUDA"), "v"));
        SearchPaths { user: list("KILN_CUDA_PATH"), toolkits, packages: python_packages() }
    }
}

fn split(value: &OsString) -> Vec<PathBuf> {
    env::split_paths(value).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// Folders with this name prefix, highest version first.
fn versions_in(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|e| e.path()).filter(|p| file_name(p).starts_with(prefix)).collect();
    found.sort();
    found.reverse();
    found
}

/// Returns `site-packages` of the active environment, of Pythons in `PATH`, of the user and of the system.
fn python_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(env::var_os).map(PathBuf::from).collect();
    for folder in env::var_os("PATH").map(|path| split(&path)).unwrap_or_default() {
        // The environment's root is the folder above `bin` or `Scripts`.
        if folder.join("python3").is_file() || folder.join("python.exe").is_file() {
            roots.extend(folder.parent().map(Path::to_owned));
            // On Windows, Python is in the root of its installation.
            roots.extend(cfg!(windows).then(|| folder.clone()));
        }
    }
    if let Some(home) = kiln_base::folders::home() {
        roots.push(home.join(".local"));
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

/// Returns every path to try, in order: the user's folders, the loader's own, toolkits, Python packages.
pub(crate) fn candidates(library: CudaLibrary, paths: &SearchPaths) -> Vec<PathBuf> {
    let files = library.files();
    let mut folders = Vec::new();
    if library == CudaLibrary::Driver {
        folders.extend(["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"].map(PathBuf::from));
    }
    for toolkit in &paths.toolkits {
        folders.extend(["lib64", "targets/x86_64-linux/lib", "bin", "bin/x64"].map(|sub| toolkit.join(sub)));
    }
    for packages in &paths.packages {
        for folder in library.wheel_folders() {
            let folder = packages.join("nvidia").join(folder);
            folders.extend(["lib", "bin", "bin/x86_64"].map(|sub| folder.join(sub)));
        }
        // PyTorch for Windows has them inside.
        if cfg!(windows) && library != CudaLibrary::Driver {
            folders.push(packages.join("torch").join("lib"));
        }
    }
    let in_folders = |folders: &[PathBuf]| -> Vec<PathBuf> {
        let paths = folders.iter().flat_map(|folder| files.iter().map(|file| folder.join(file)));
        paths.filter(|path| path.is_file()).collect()
    };
    if cfg!(windows) && library == CudaLibrary::Driver {
        // Part of the system there, and of nothing else.
        return by_loader(library, &in_folders);
    }
    [in_folders(&paths.user), by_loader(library, &in_folders), in_folders(&folders)].concat()
}

/// Names that the loader finds.
#[cfg(unix)]
fn by_loader(library: CudaLibrary, _: &dyn Fn(&[PathBuf]) -> Vec<PathBuf>) -> Vec<PathBuf> {
    library.files().iter().map(PathBuf::from).collect()
}

/// Where Windows' loader would look, as full paths. It would also look into the current folder.
#[cfg(windows)]
fn by_loader(library: CudaLibrary, in_folders: &dyn Fn(&[PathBuf]) -> Vec<PathBuf>) -> Vec<PathBuf> {
    let system = kiln_windows::system_folder().ok();
    let listed = env::var_os("PATH").filter(|_| library != CudaLibrary::Driver);
    let listed = listed.map(|path| split(&path)).unwrap_or_default();
    let folders = system.into_iter().chain(listed.into_iter().filter(|folder| folder.is_absolute()));
    in_folders(&folders.collect::<Vec<_>>())
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
        let file = CudaLibrary::Nvrtc.files()[0].clone();
        let user = touch(&root.path().join("mine"), &file);
        let toolkit = touch(&root.path().join("cuda/lib64"), &file);
        let wheel = touch(&root.path().join("site/nvidia/cuda_nvrtc/lib"), &file);
        let paths = SearchPaths {
            user: vec![root.path().join("mine")],
            toolkits: vec![root.path().join("cuda")],
            packages: vec![root.path().join("site")],
        };
        let found = candidates(CudaLibrary::Nvrtc, &paths);
        let at = |path: &Path| found.iter().position(|p| p == path).unwrap();
        assert!(at(&user) < at(&toolkit) && at(&toolkit) < at(&wheel));
        if cfg!(unix) {
            assert!(at(&user) < at(Path::new(&file)) && at(Path::new(&file)) < at(&toolkit));
        }
    }

    #[cfg(windows)]
    #[test]
    fn nothing_is_loaded_by_its_name_which_might_be_in_the_current_folder() {
        let paths = SearchPaths::from_env();
        for library in CudaLibrary::ALL {
            assert!(candidates(library, &paths).iter().all(|path| path.is_absolute()), "{library:?}");
        }
        let driver = candidates(CudaLibrary::Driver, &SearchPaths::default());
        let system = kiln_windows::system_folder().unwrap();
        assert!(driver.iter().all(|path| path.parent() == Some(&system)), "{driver:?}");
    }

    #[test]
    fn a_newer_library_comes_before_an_older_one_of_the_same_folder() {
        let root = tempfile::tempdir().unwrap();
        let files = CudaLibrary::CublasLt.files();
        let (old, new) = (touch(root.path(), &files[1]), touch(root.path(), &files[0]));
        let paths = SearchPaths { user: vec![root.path().to_owned()], ..SearchPaths::default() };
        assert_eq!(candidates(CudaLibrary::CublasLt, &paths)[..2], [new, old]);
    }

    #[test]
    fn folders_without_the_file_are_not_tried() {
        let paths = SearchPaths { toolkits: vec!["/nowhere".into()], ..SearchPaths::default() };
        let found = candidates(CudaLibrary::Nvrtc, &paths);
        assert!(found.iter().all(|path| !path.starts_with("/nowhere")), "{found:?}");
    }
}
