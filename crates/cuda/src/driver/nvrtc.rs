//! NVRTC: compilation of CUDA C++ to PTX at run time, if the toolkit's library is installed.
//! Versions 12 and 13.
//!
//! cudarc's bindings find the library and give the types. The calls go through this module's own
//! table, for the reasons that [`real`](super::real) gives for the driver's functions.
//!
//! This module must not know the driver.

use super::loader::refusal;
use cudarc::nvrtc::sys::{self, nvrtcProgram};
use leasehold_core::sync::OnceLock;
use leasehold_core::{Error, Result};
use std::ffi::{CString, c_char, c_int};
use std::ptr;

/// The oldest supported release.
const OLDEST: i32 = 12;
const COMPILATION: c_int = sys::nvrtcResult::NVRTC_ERROR_COMPILATION as c_int;

macro_rules! functions {
    ($($name:ident($($arg:ty),*);)*) => {
        #[expect(non_snake_case, reason = "the library's own names")]
        #[derive(Debug, Clone, Copy)]
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        $(const _: unsafe fn($($arg),*) -> sys::nvrtcResult = sys::$name;)*

        impl Functions {
            fn load() -> Result<Self> {
                // SAFETY: loading the library runs its initialisers.
                if !unsafe { sys::is_culib_present() } {
                    if let Some(why) = refusal(cudarc::get_lib_name_candidates("nvrtc")) {
                        let text = format!("NVRTC: the library is there and cannot be loaded: {why}");
                        return Err(Error::Unavailable(text.into()));
                    }
                    return Err(Error::Unavailable(
                        "NVRTC: no libnvrtc.so, libnvrtc.so.13 or libnvrtc.so.12 (nvrtc64_130_0.dll) where the system's loader looks; kernels can \
                         still be loaded as PTX".into(),
                    ));
                }
                // SAFETY: the library is present, so cudarc finds it again. The library stays
                // loaded for ever.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $(
                        // SAFETY: the library's symbol of this name has this signature. The types
                        // are checked against cudarc's bindings, and a result is an `int` in the C
                        // interface.
                        $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map_err(|_| Error::Unavailable(concat!("NVRTC: the library has no function ", stringify!($name)).into()))?,
                    )*
                })
            }
        }
    };
}

functions! {
    nvrtcVersion(*mut c_int, *mut c_int);
    nvrtcGetNumSupportedArchs(*mut c_int);
    nvrtcGetSupportedArchs(*mut c_int);
    nvrtcCreateProgram(*mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
    nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
    nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
    nvrtcGetPTXSize(nvrtcProgram, *mut usize);
    nvrtcGetPTX(nvrtcProgram, *mut c_char);
    nvrtcDestroyProgram(*mut nvrtcProgram);
}

/// The compiler of this process.
#[derive(Debug)]
pub struct Compiler {
    functions: Functions,
    version: (i32, i32),
    /// Compute capabilities times ten, ascending.
    architectures: Vec<i32>,
}

/// A program. The drop destroys it.
struct Program<'a> {
    compiler: &'a Compiler,
    native: nvrtcProgram,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: `nvrtcCreateProgram` made the program, and only this drop destroys it.
        unsafe { (self.compiler.functions.nvrtcDestroyProgram)(&raw mut self.native) };
    }
}

impl Compiler {
    /// Finds NVRTC, once per process. A failure is not remembered, because NVRTC may be installed
    /// later.
    ///
    /// # Errors
    /// `Unavailable`, with the names that were searched.
    pub fn load() -> Result<&'static Self> {
        static FOUND: OnceLock<Compiler> = OnceLock::new();
        if let Some(compiler) = FOUND.get() {
            return Ok(compiler);
        }
        let compiler = Self::find()?;
        Ok(FOUND.get_or_init(|| compiler))
    }

    fn find() -> Result<Self> {
        let functions = Functions::load()?;
        let failed = |what: &str, code: c_int| {
            Error::Unavailable(format!("NVRTC: {what} failed with code {code}").into())
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the pointers are to locals.
        match unsafe { (functions.nvrtcVersion)(&raw mut major, &raw mut minor) } {
            0 if major >= OLDEST => {}
            0 => {
                return Err(Error::Unavailable(
                    format!("NVRTC: {major}.{minor} is older than {OLDEST}.0").into(),
                ));
            }
            code => return Err(failed("nvrtcVersion", code)),
        }
        let mut count = 0;
        // SAFETY: the pointer is to a local.
        match unsafe { (functions.nvrtcGetNumSupportedArchs)(&raw mut count) } {
            0 => {}
            code => return Err(failed("nvrtcGetNumSupportedArchs", code)),
        }
        let mut architectures = vec![0; count.max(0) as usize];
        // SAFETY: the list has as many places as the library said.
        match unsafe { (functions.nvrtcGetSupportedArchs)(architectures.as_mut_ptr()) } {
            0 => {}
            code => return Err(failed("nvrtcGetSupportedArchs", code)),
        }
        architectures.sort_unstable();
        Ok(Self { functions, version: (major, minor), architectures })
    }

    /// The compiler's name and version: `nvrtc 13.0`.
    #[must_use]
    pub fn version(&self) -> String {
        format!("nvrtc {}.{}", self.version.0, self.version.1)
    }

    /// The architecture to compile for, such as `compute_90`: the newest that the compiler knows
    /// and the device understands.
    ///
    /// # Errors
    /// `Unavailable` for a device that is older than every architecture of the compiler.
    pub fn architecture(&self, compute_capability: (u32, u32)) -> Result<String> {
        newest(&self.architectures, compute_capability)
            .map(|arch| format!("compute_{arch}"))
            .ok_or_else(|| {
                let (major, minor) = compute_capability;
                Error::Unavailable(
                    format!(
                        "NVRTC {}.{}: compiles for no device as old as {major}.{minor}",
                        self.version.0, self.version.1
                    )
                    .into(),
                )
            })
    }

    /// Compiles CUDA C++ to PTX. Blocks for about 10 ms to seconds.
    ///
    /// # Errors
    /// `Compile` with the log; `InvalidArgument` for a text that contains a zero.
    pub fn compile(
        &self,
        source: &str,
        name: &str,
        options: &[String],
        architecture: &str,
    ) -> Result<Vec<u8>> {
        let source =
            CString::new(source).map_err(|_| Error::invalid("CUDA C++ must not hold a zero"))?;
        let name = CString::new(name)
            .map_err(|_| Error::invalid("a kernel's name must not hold a zero"))?;
        let mut texts = Vec::with_capacity(options.len() + 1);
        if !options.iter().any(|option| names_architecture(option)) {
            texts.push(format!("--gpu-architecture={architecture}"));
        }
        texts.extend_from_slice(options);
        let texts: Vec<CString> = texts
            .into_iter()
            .map(|text| {
                CString::new(text)
                    .map_err(|_| Error::invalid("an option of the compiler must not hold a zero"))
            })
            .collect::<Result<_>>()?;
        let pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();

        let mut native: nvrtcProgram = ptr::null_mut();
        // SAFETY: the texts end with a zero and live until the program is destroyed. No headers are
        // passed.
        let code = unsafe {
            (self.functions.nvrtcCreateProgram)(
                &raw mut native,
                source.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        if code != 0 {
            return Err(compile_error("nvrtcCreateProgram", code, ""));
        }
        let program = Program { compiler: self, native };
        // SAFETY: the program lives, and the count is that of the pointers.
        let code = unsafe {
            (self.functions.nvrtcCompileProgram)(
                program.native,
                pointers.len() as c_int,
                pointers.as_ptr(),
            )
        };
        if code != 0 {
            return Err(compile_error("nvrtcCompileProgram", code, &program.log()));
        }
        program.ptx()
    }
}

impl Program<'_> {
    fn log(&self) -> String {
        let f = &self.compiler.functions;
        let mut size = 0;
        // SAFETY: the program lives, and the pointer is to a local.
        if unsafe { (f.nvrtcGetProgramLogSize)(self.native, &raw mut size) } != 0 {
            return String::new();
        }
        let mut log = vec![0_u8; size];
        // SAFETY: the buffer has the size that the library asked for.
        if unsafe { (f.nvrtcGetProgramLog)(self.native, log.as_mut_ptr().cast()) } != 0 {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()
    }

    fn ptx(&self) -> Result<Vec<u8>> {
        let f = &self.compiler.functions;
        let mut size = 0;
        // SAFETY: the program lives, and the pointer is to a local.
        let code = unsafe { (f.nvrtcGetPTXSize)(self.native, &raw mut size) };
        if code != 0 {
            return Err(compile_error("nvrtcGetPTXSize", code, ""));
        }
        let mut ptx = vec![0_u8; size];
        // SAFETY: the buffer has the size that the library asked for.
        let code = unsafe { (f.nvrtcGetPTX)(self.native, ptx.as_mut_ptr().cast()) };
        if code != 0 {
            return Err(compile_error("nvrtcGetPTX", code, ""));
        }
        while ptx.last() == Some(&0) {
            ptx.pop();
        }
        Ok(ptx)
    }
}

fn compile_error(api: &str, code: c_int, log: &str) -> Error {
    let log = if code == COMPILATION && !log.is_empty() {
        log.to_owned()
    } else {
        format!("{api} failed with code {code}\n{log}")
    };
    Error::Compile { log: log.trim_end().into() }
}

/// Whether an option names the architecture.
fn names_architecture(option: &str) -> bool {
    let key = option.split(['=', ' ']).next().unwrap_or(option);
    matches!(key, "--gpu-architecture" | "-arch")
}

/// The newest of `architectures` (ascending, times ten) that a device understands.
fn newest(architectures: &[i32], (major, minor): (u32, u32)) -> Option<i32> {
    let device = i32::try_from(major * 10 + minor).ok()?;
    architectures.iter().rev().copied().find(|&arch| arch <= device)
}

#[cfg(test)]
#[path = "../../tests/unit/nvrtc.rs"]
mod tests;
