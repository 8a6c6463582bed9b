//! CUDA and Metal kernels on the host, for tests: their sources, compiled as C++, run block by
//! block. The threads of a block are fibers, so barriers and shuffles are real.
//!
//! * [`Emulator::cuda`] compiles CUDA C++ with `g++`; `include/cuda.hpp` has the names of the
//!   language that the operator library uses.
//! * [`Emulator::metal`] compiles the Metal shading language with `clang++`, for which address
//!   spaces are a part of a pointer's type; `include/metal_stdlib` is the standard library.
//!
//! `include/fibers.hpp` has the fibers. An emulator cannot show the speed, the memory order or the
//! compiler of a GPU.
//!
//! Without the compiler no emulation runs; with `LEASEHOLD_REQUIRE_TOOLS` in the environment this
//! is an error. `LEASEHOLD_NO_EMULATION` disables it, because fibers switch stacks, which
//! AddressSanitizer does not support.
//!
//! ```
//! use leasehold_emulator::{Emulator, Source};
//! let text = "#include <metal_stdlib>
//! kernel void twice(device float* y [[buffer(0)]], constant float& by [[buffer(1)]],
//!                   uint i [[thread_index_in_threadgroup]]) { y[i] *= by; }";
//! // SAFETY: nothing of the source runs when it is loaded.
//! let emulator = unsafe { Emulator::metal(&[Source { name: "twice.metal", text }])? };
//! if let Some(emulator) = emulator {
//!     let mut y = [3.0_f32; 32];
//!     let at = y.as_mut_ptr().expose_provenance() as u64;
//!     // SAFETY: the kernel's 32 threads access the 32 elements.
//!     unsafe { emulator.run("twice", &[at], &2.0_f32.to_le_bytes(), [1; 3], [32, 1, 1], false)? };
//!     assert_eq!(y, [6.0; 32]);
//! }
//! # Ok::<(), String>(())
//! ```
//!
//! This module must not know which kernels exist.

mod metal;

use leasehold_core::sync::Mutex;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Its name, for messages of the compiler.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
}

/// Name, arguments and their bytes, grid, block, reverse order. Returns 1 for an unknown name.
type Entry =
    unsafe extern "C" fn(*const c_char, *const u8, usize, *const u32, *const u32, c_int) -> c_int;

/// A compiled library of kernels.
#[derive(Debug)]
pub struct Emulator {
    /// One launch at a time, because a library has one block.
    entry: Mutex<Entry>,
}

/// The files that the sources include.
const HEADERS: [(&str, &str); 3] = [
    ("fibers.hpp", include_str!("../include/fibers.hpp")),
    ("cuda.hpp", include_str!("../include/cuda.hpp")),
    ("metal_stdlib", include_str!("../include/metal_stdlib")),
];

/// Options of both compilers. The checks find misaligned vectors, overflowing shifts, and indices
/// outside arrays.
const OPTIONS: [&str; 9] = [
    "-O1",
    "-g",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
    "-fsanitize=alignment,shift,bounds",
];

/// The definition of [`Entry`], with a line for each kernel.
fn entry_of(cases: &str) -> String {
    format!(
        "extern \"C\" __attribute__((visibility(\"default\"))) int emulate(const char* name, \
         const unsigned char* arguments, size_t size, const unsigned* grid, const unsigned* block, \
         int reverse) {{\n{cases}    return 1;\n}}\n"
    )
}

impl Emulator {
    /// Compiles CUDA C++. `common` goes before all sources; `kernels` names each kernel and the
    /// index of its source. Blocks on the compiler, for seconds. `None` without the compiler.
    ///
    /// # Errors
    /// The compiler's messages, or the reason why the library does not load.
    ///
    /// # Safety
    /// - The sources are safe to load: what runs at that time, such as the initialiser of a
    ///   variable, accesses only the library's own memory.
    pub unsafe fn cuda(
        common: Source<'_>,
        sources: &[Source<'_>],
        kernels: &[(&str, usize)],
    ) -> Result<Option<Self>, String> {
        let mut program =
            format!("#include \"cuda.hpp\"\n#line 1 \"{}\"\n{}\n", common.name, common.text);
        for (i, source) in sources.iter().enumerate() {
            let Source { name, text } = source;
            let _ = write!(program, "namespace file{i} {{\n#line 1 \"{name}\"\n{text}\n}}\n");
        }
        let mut cases = String::new();
        for (name, source) in kernels {
            let _ = writeln!(
                cases,
                "    if (!strcmp(name, \"{name}\")) return emulator::launch(file{source}::{name}, \
                 arguments, size, grid, block, reverse), 0;"
            );
        }
        program.push_str(&entry_of(&cases));
        let options = ["-std=c++17", "-fno-sanitize-recover=all"];
        // SAFETY: the caller vouches for the sources.
        unsafe { Self::build("g++", &options, &[("kernels.cpp".to_owned(), program)]) }
    }

    /// Compiles libraries of the Metal shading language, each a whole text. A library's kernels are
    /// those that it defines; their names are unique. Blocks on the compiler, for seconds. `None`
    /// without the compiler.
    ///
    /// # Errors
    /// The compiler's messages, a signature that the emulator does not understand, or the reason
    /// why the library does not load.
    ///
    /// # Safety
    /// - The sources are safe to load: what runs at that time, such as the initialiser of a
    ///   variable, accesses only the library's own memory.
    pub unsafe fn metal(libraries: &[Source<'_>]) -> Result<Option<Self>, String> {
        let mut program = String::from("#include <metal_stdlib>\n");
        let mut files = Vec::new();
        let mut cases = String::new();
        for (i, library) in libraries.iter().enumerate() {
            let (text, kernels) =
                metal::translate(library.text).map_err(|why| format!("{}: {why}", library.name))?;
            let file = format!("library{i}.metal");
            let _ = write!(program, "namespace library{i} {{\n#include \"{file}\"\n}}\n");
            for kernel in kernels {
                cases.push_str(&kernel.case(&format!("library{i}")));
            }
            files.push((file, format!("#line 1 \"{}\"\n{text}", library.name)));
        }
        program.push_str(&entry_of(&cases));
        files.insert(0, ("kernels.cpp".to_owned(), program));
        // The language is C++14 with extensions. Traps need no library of the compiler.
        // SAFETY: the caller vouches for the sources.
        unsafe { Self::build("clang++", &["-std=c++14", "-fsanitize-trap=all"], &files) }
    }

    /// # Safety
    /// - As [`cuda`](Self::cuda).
    unsafe fn build(
        compiler: &str,
        options: &[&str],
        files: &[(String, String)],
    ) -> Result<Option<Self>, String> {
        if std::env::var_os("LEASEHOLD_NO_EMULATION").is_some() {
            eprintln!("skipped: no emulation of kernels, as asked");
            return Ok(None);
        }
        let failed = |e: std::io::Error| format!("the sources are not written: {e}");
        let folder = tempfile::tempdir().map_err(failed)?;
        let headers = HEADERS.iter().map(|(name, text)| (*name, *text));
        for (name, text) in headers.chain(files.iter().map(|(n, t)| (n.as_str(), t.as_str()))) {
            fs::write(folder.path().join(name), text).map_err(failed)?;
        }
        let library = folder.path().join("kernels.so");
        let compiled = Command::new(compiler)
            .args(options)
            .args(OPTIONS)
            .arg("-I")
            .arg(folder.path())
            .arg(folder.path().join("kernels.cpp"))
            .arg("-o")
            .arg(&library)
            .output();
        match compiled {
            // SAFETY: the compiler made the library of the sources that the caller vouches for.
            Ok(output) if output.status.success() => unsafe { Self::load(&library) }.map(Some),
            Ok(output) => Err(format!("{compiler}: {}", String::from_utf8_lossy(&output.stderr))),
            Err(e) if std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_some() => {
                Err(format!("{compiler} is required: {e}"))
            }
            Err(e) => {
                eprintln!("skipped: no emulation of kernels, {compiler}: {e}");
                Ok(None)
            }
        }
    }

    /// # Safety
    /// - The library is what [`build`](Self::build) made.
    unsafe fn load(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.to_string_lossy().into_owned()).map_err(|e| e.to_string())?;
        // SAFETY: loading runs the initialisers of the caller's sources and of this crate's
        // headers. The caller vouches for the former, and the latter access only the library's own
        // memory.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: the call before failed, so a message without a null pointer is there.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(format!("the emulated kernels do not load: {}", why.to_string_lossy()));
        }
        // SAFETY: the library stays loaded.
        let entry = unsafe { libc::dlsym(library, c"emulate".as_ptr()) };
        if entry.is_null() {
            return Err("the emulated kernels have no entry".to_owned());
        }
        // SAFETY: the symbol is the function that the program defines, with this signature.
        let entry = unsafe { std::mem::transmute::<*mut libc::c_void, Entry>(entry) };
        Ok(Self { entry: Mutex::new(entry) })
    }

    /// Runs a launch: the operands' addresses, then the parameters. With `reverse`, blocks and
    /// threads run from the last to the first. Blocks until the launch is over, and while another
    /// thread's launch runs. A wrong barrier or shuffle ends the process with a message.
    ///
    /// # Errors
    /// A kernel that the library does not have, or a launch without threads.
    ///
    /// # Safety
    /// - The kernel accepts the launch: the memory that it accesses is live, and no other code
    ///   accesses the memory meanwhile.
    pub unsafe fn run(
        &self,
        kernel: &str,
        operands: &[u64],
        params: &[u8],
        grid: [u32; 3],
        block: [u32; 3],
        reverse: bool,
    ) -> Result<(), String> {
        if grid.contains(&0) || block.contains(&0) {
            return Err(format!("kernel {kernel} with {grid:?} blocks of {block:?} threads"));
        }
        let mut arguments: Vec<u8> = operands.iter().flat_map(|at| at.to_le_bytes()).collect();
        arguments.extend(params);
        // Parameters are aligned as in a launch; eight bytes suffice for all words.
        let mut words = vec![0_u64; arguments.len().div_ceil(8)];
        // SAFETY: the words have at least as many bytes, and the two do not overlap.
        unsafe {
            words
                .as_mut_ptr()
                .cast::<u8>()
                .copy_from_nonoverlapping(arguments.as_ptr(), arguments.len());
        }
        let name = CString::new(kernel).map_err(|e| e.to_string())?;
        let entry = self.entry.lock();
        // SAFETY: the caller vouches for the kernel's accesses. The lock admits one launch.
        let status = unsafe {
            entry(
                name.as_ptr(),
                words.as_ptr().cast(),
                arguments.len(),
                grid.as_ptr(),
                block.as_ptr(),
                c_int::from(reverse),
            )
        };
        if status == 0 { Ok(()) } else { Err(format!("no emulated kernel is named {kernel}")) }
    }
}
