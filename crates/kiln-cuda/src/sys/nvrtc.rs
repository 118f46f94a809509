//! NVRTC, the run-time kernel compiler.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use super::functions;
use crate::error::{Error, Result};

type Program = *mut c_void;
type Status = c_int;

functions! {
    /// The kernel compiler.
    Nvrtc {
        fn version = "nvrtcVersion"(*mut c_int, *mut c_int) -> Status;
        fn arch_count = "nvrtcGetNumSupportedArchs"(*mut c_int) -> Status;
        fn archs = "nvrtcGetSupportedArchs"(*mut c_int) -> Status;
        fn create = "nvrtcCreateProgram"(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        ) -> Status;
        fn destroy = "nvrtcDestroyProgram"(*mut Program) -> Status;
        fn compile = "nvrtcCompileProgram"(Program, c_int, *const *const c_char) -> Status;
        fn log_size = "nvrtcGetProgramLogSize"(Program, *mut usize) -> Status;
        fn log = "nvrtcGetProgramLog"(Program, *mut c_char) -> Status;
        fn cubin_size = "nvrtcGetCUBINSize"(Program, *mut usize) -> Status;
        fn cubin = "nvrtcGetCUBIN"(Program, *mut c_char) -> Status;
        fn ptx_size = "nvrtcGetPTXSize"(Program, *mut usize) -> Status;
        fn ptx = "nvrtcGetPTX"(Program, *mut c_char) -> Status;
        fn error_text = "nvrtcGetErrorString"(Status) -> *const c_char;
    }
}

impl Nvrtc {
    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a static string for every status.
        let text = unsafe { CStr::from_ptr((self.error_text)(status)) };
        Err(Error::Call { call, what: text.to_string_lossy().into_owned() })
    }

    /// Major and minor version.
    pub fn read_version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are written.
        self.check("nvrtcVersion", unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    /// The supported compute capabilities, times 10.
    pub fn supported_archs(&self) -> Result<Vec<i32>> {
        let mut count = 0;
        // SAFETY: the library writes the count, then that many values.
        unsafe {
            self.check("nvrtcGetNumSupportedArchs", (self.arch_count)(&mut count))?;
            let mut archs = vec![0; count.max(0) as usize];
            self.check("nvrtcGetSupportedArchs", (self.archs)(archs.as_mut_ptr()))?;
            Ok(archs)
        }
    }

    /// Compiles one source to machine code if `binary`, otherwise to PTX.
    pub fn build(
        &self,
        name: &'static str,
        source: &str,
        arch: &str,
        options: &[String],
        binary: bool,
    ) -> Result<Vec<u8>> {
        let broken = || Error::Call { call: "nvrtcCreateProgram", what: "a zero byte in the source".into() };
        let text = CString::new(source).map_err(|_| broken())?;
        let file = CString::new(format!("{name}.cu")).map_err(|_| broken())?;
        let options: Vec<CString> = options
            .iter()
            .map(|o| CString::new(o.as_str()))
            .collect::<Result<_, _>>()
            .map_err(|_| broken())?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = null_mut();
        // SAFETY: the strings are nul-terminated and outlive the program, which is always destroyed.
        unsafe {
            let status = (self.create)(&mut program, text.as_ptr(), file.as_ptr(), 0, null(), null());
            self.check("nvrtcCreateProgram", status)?;
            let status = (self.compile)(program, pointers.len() as c_int, pointers.as_ptr());
            let result = match status {
                0 => self.image(program, binary),
                _ => Err(Error::Compile { source_name: name, arch: arch.into(), log: self.log_of(program) }),
            };
            (self.destroy)(&mut program);
            result
        }
    }

    /// # Safety
    ///
    /// `program` was compiled.
    unsafe fn image(&self, program: Program, binary: bool) -> Result<Vec<u8>> {
        let (size_of, get) = if binary { (self.cubin_size, self.cubin) } else { (self.ptx_size, self.ptx) };
        let mut size = 0;
        // SAFETY: the buffer has the size the library reported.
        unsafe {
            self.check("nvrtcGetCUBINSize", size_of(program, &mut size))?;
            let mut image = vec![0u8; size];
            self.check("nvrtcGetCUBIN", get(program, image.as_mut_ptr().cast()))?;
            Ok(image)
        }
    }

    /// # Safety
    ///
    /// `program` was created.
    unsafe fn log_of(&self, program: Program) -> String {
        let mut size = 0;
        // SAFETY: the buffer has the size the library reported.
        unsafe {
            if (self.log_size)(program, &mut size) != 0 {
                return String::new();
            }
            let mut log = vec![0u8; size];
            (self.log)(program, log.as_mut_ptr().cast());
            String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
        }
    }
}
