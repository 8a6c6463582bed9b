//! CUDA and Metal kernels on the host, for tests: their sources, compiled as C++, run block by
//! block. The threads of a block are fibers, so barriers and shuffles are real. Inline PTX for
//! Hopper's tensor maps, bulk copies and products is understood.
//!
//! * [`Program::cuda`] compiles CUDA C++ with `g++`; `include/cuda.hpp` has the language.
//! * [`Program::metal`] compiles the Metal shading language with `clang++`, for which address
//!   spaces are a part of a pointer's type; `include/metal_stdlib` is the standard library.
//!
//! CUDA's short floats are there (`cuda_fp16.h`, `cuda_bf16.h`, `cuda_fp8.h`), without the toolkit.
//! Of inline PTX `mma.sync` is, with 16 rows and 8 columns, and `wgmma` with sums of `f32`. So are
//! `mbarrier` and `cp.async.bulk`, with tensor maps and multicasts, and fences and moves. What is
//! not known is refused with its line.
//!
//! A tensor map is the 128 bytes of the simulated driver, which name memory by
//! [`Operand::device`]. A map of other memory, a box that the instruction cannot copy, and counts
//! of an `mbarrier` beyond its own fail the launch.
//!
//! A program is bytes: nothing of its sources runs before a launch. An [`Emulator`] is a loaded
//! program with variables of its own. `include/fibers.hpp` has the fibers.
//!
//! # What it shows
//! * A barrier or shuffle that some threads never reach, an index outside of an array, a misaligned
//!   access, a division by zero: each fails the launch with a message.
//! * In a CUDA program that is [watched](Cuda::watched): an access outside of the operands, of the
//!   shared memory and of the source's variables, and one that the operand is not declared for.
//!   Also a race: two threads access a byte without an order, and one of them changes it. An order
//!   is a barrier, a meeting of a warp, or a flag: a fence and an atomic or volatile write in one
//!   thread, an atomic or volatile read of it in the other. Ranges are looked at up to 16 MiB each,
//!   variables of the source are not.
//!   A bulk copy, or a warpgroup's product, is an access of its own, which a thread knows behind
//!   a wait for it. What it reads needs `fence.proxy.async` behind the write.
//! * A missing barrier gives other results in one of the two orders of blocks and threads. So does
//!   a missing wait for a bulk copy or a product: in the second order it runs as late as it may.
//! * A sum of `wgmma` that a thread touches before its wait, or before the next product without a
//!   fence.
//! * A thread that ends before its bulk stores have read shared memory, and a bulk copy for which
//!   no thread waits.
//!
//! # What it cannot show
//! The speed, the memory order and the compiler of a GPU. Clusters of blocks follow each other: a
//! block that waits for one of a later cluster waits for ever. In a cluster, races in another
//! block's shared memory are not looked for. Blocks of a cooperative launch take turns, without
//! clusters; races between them are looked for as between other blocks, by any fence of the first.
//!
//! `im2col` copies, bulk reductions and bulk copies between blocks are refused. A device's bulk
//! store writes pieces of 16 bytes: where rows of a tensor end within one, the H200 writes the rest
//! of it. The emulator does not.
//!
//! Products and sums are not fused, and functions of mathematics are the host's, so last bits may
//! differ.
//!
//! Fibers switch stacks, which AddressSanitizer does not support. `LEASEHOLD_NO_EMULATION` in the
//! environment switches the emulator off.
//!
//! ```
//! use leasehold_emulator::{Cuda, Emulator, Failure, Launch, Operand, Program, Source};
//! let text = r#"extern "C" __global__ void twice(float* y, float by) {
//!     y[blockIdx.x * blockDim.x + threadIdx.x] *= by;
//! }"#;
//! let source = Source { name: "twice.cu", text };
//! let program = match Program::cuda(&Cuda { source, options: &[], watched: true }) {
//!     Err(Failure::Missing(_)) => return Ok(()), // no g++
//!     program => program?,
//! };
//! assert_eq!(program.kernels()[0].name, "twice");
//! let mut y = [3.0_f32; 64];
//! let at = y.as_mut_ptr().expose_provenance() as u64;
//! let operand = Operand { at, device: at, bytes: 256, reads: true, writes: true };
//! let launch = Launch {
//!     kernel: "twice",
//!     operands: &[operand],
//!     params: &2.0_f32.to_le_bytes(),
//!     grid: [2, 1, 1],
//!     block: [32, 1, 1],
//!     shared: 0,
//!     cluster: [1; 3],
//!     cooperative: false,
//!     reverse: false,
//! };
//! // SAFETY: the kernel's 64 threads access the 64 elements.
//! unsafe { Emulator::new(program).run(&launch)? };
//! assert_eq!(y, [6.0; 64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This module must not know which kernels exist.

mod asm;
mod compile;
mod cuda;
mod elf;
mod failure;
mod families;
mod kernel;
mod library;
mod metal;
mod tokens;

pub use failure::Failure;
pub use kernel::{Kernel, Param};

use compile::Workshop;
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use library::{Library, NativeLaunch, NativeOperand};
use std::ffi::CString;
use std::fmt::Write as _;

/// A file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Its name, for messages of the compiler.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
}

/// A CUDA source, and how it is compiled.
#[derive(Debug, Clone, Copy)]
pub struct Cuda<'a> {
    /// The source.
    pub source: Source<'a>,
    /// Options of NVIDIA's run-time compiler. Macros, folders of headers, headers and the release
    /// of C++ are followed, others have no meaning here.
    pub options: &'a [String],
    /// Each access to memory is checked, at several times the cost.
    pub watched: bool,
}

#[derive(Debug)]
struct Compiled {
    image: Vec<u8>,
    kernels: Vec<Kernel>,
    watched: bool,
}

/// Sources that are compiled. Clones are the same program.
#[derive(Debug, Clone)]
pub struct Program(Arc<Compiled>);

/// The files that the sources include.
const HEADERS: [(&str, &str); 8] = [
    ("include/fibers.hpp", include_str!("../include/fibers.hpp")),
    ("include/conversions.hpp", include_str!("../include/conversions.hpp")),
    ("include/cuda.hpp", include_str!("../include/cuda.hpp")),
    ("include/ptx.hpp", include_str!("../include/ptx.hpp")),
    ("include/bulk.hpp", include_str!("../include/bulk.hpp")),
    ("include/products.hpp", include_str!("../include/products.hpp")),
    ("include/short_floats.hpp", include_str!("../include/short_floats.hpp")),
    ("include/metal_stdlib", include_str!("../include/metal_stdlib")),
];

/// Options of all compilations.
const OPTIONS: [&str; 8] = [
    "-O1",
    // Ubuntu's compiler asks for it, and its longjmp ends a process that goes to another stack.
    "-U_FORTIFY_SOURCE",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
];

/// The checks find misaligned vectors, shifts by too many bits, and indices outside arrays. Devices
/// shift numbers below zero as any others.
const CHECKS: &str = "-fsanitize=alignment,shift-exponent,bounds";

/// The text of the runtime of CUDA programs.
const RUNTIME: &str = include_str!("../include/cuda_runtime.cpp");

/// The runtime of CUDA programs, compiled once.
fn cuda_runtime() -> Result<Vec<u8>, Failure> {
    static MADE: OnceLock<Vec<u8>> = OnceLock::new();
    if let Some(made) = MADE.get() {
        return Ok(made.clone());
    }
    let text = ("runtime.cpp", RUNTIME);
    let files = HEADERS.into_iter().chain([text]);
    let whole = files.clone().map(|(_, text)| text).collect::<String>();
    let options =
        ["-std=c++17", "-fno-extern-tls-init", "-c", "-Iinclude", "runtime.cpp", "-o", "runtime.o"];
    let options: Vec<&str> = OPTIONS.into_iter().chain(options).collect();
    let made = compile::kept("g++", &options, &whole, || {
        let workshop = Workshop::new(files.map(|(name, text)| (name, text.as_bytes())))?;
        workshop.run("", "g++", &options)?;
        workshop.read("runtime.o")
    })?;
    Ok(MADE.get_or_init(|| made).clone())
}

impl Program {
    /// Compiles CUDA C++. The kernels are the `__global__` functions that the text defines. Blocks
    /// on the compiler for about a second, or reads what it made of the same text before.
    ///
    /// # Errors
    /// [`Failure::Missing`] without g++. [`Failure::Refused`] with the compiler's messages, or with
    /// what is not emulated.
    pub fn cuda(cuda: &Cuda<'_>) -> Result<Self, Failure> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let name = cuda.source.name.replace(|c| !plain(c), "_");
        let name = if name.starts_with(['-', '.']) { format!("_{name}") } else { name };
        let file = format!("source/{name}");
        let absent = cuda::ABSENT_HEADERS
            .map(|(name, what)| (format!("include/{name}"), cuda::absent_header(name, what)));
        let present =
            cuda::PRESENT_HEADERS.map(|(name, text)| (format!("include/{name}"), text.to_owned()));
        let toolkit = absent.iter().chain(&present).map(|(n, t)| (n.as_str(), t.as_str()));
        let files = HEADERS
            .into_iter()
            .chain(toolkit)
            .chain([(file.as_str(), cuda.source.text)])
            .map(|(name, text)| (name, text.as_bytes()));
        let workshop = Workshop::new(files)?;

        let current = std::env::current_dir().unwrap_or_default().display().to_string();
        let asked = cuda::options(cuda.options);
        let release = asked.last().cloned().unwrap_or_default();
        let mut options: Vec<String> =
            ["-E", "-w", "-I", cuda::HEADERS, "-include", "cuda.hpp"].map(str::to_owned).to_vec();
        options.extend(asked);
        if cuda.source.text.contains(cuda::TENSOR_MAP) {
            options.push("-DLEASEHOLD_OWN_TENSOR_MAP".to_owned());
        }
        options.extend(["-iquote".to_owned(), current]);
        options.extend(["-x", "c++", &name, "-o", "../text.ii"].map(str::to_owned));
        workshop.run("source", "g++", &options)?;

        let text = workshop.read("text.ii")?;
        let text = cuda::translate(&String::from_utf8_lossy(&text)).map_err(Failure::Refused)?;
        workshop.write("text.ii", text.as_bytes())?;
        let mut options: Vec<&str> = OPTIONS.to_vec();
        options.extend([&release, CHECKS, "-fsanitize=integer-divide-by-zero"]);
        options.extend(["-fno-sanitize-recover=all", "-fno-extern-tls-init", "-fno-ipa-icf"]);
        options.extend(["-fno-exceptions", "-fno-rtti", "-fno-diagnostics-color"]);
        // The preprocessor has moved the columns.
        options.extend(["-fno-show-column", "-fno-diagnostics-show-caret"]);
        options.extend(["-fmax-errors=20", "-fno-asynchronous-unwind-tables"]);
        if cuda.watched {
            options.extend(["-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]);
        }
        options.extend(["-x", "c++-cpp-output", "-c", "../text.ii", "-o", "../text.o"]);
        // The text has all headers but those of the runtime.
        let whole = [&*text, RUNTIME].concat() + &HEADERS.map(|(_, text)| text).concat();
        let image = compile::kept("g++", &options, &whole, || {
            workshop.run("source", "g++", &options)?;
            let dynamic = cuda::dynamic(&workshop.read("text.o")?);
            workshop.write("dynamic.s", dynamic.as_bytes())?;
            workshop.write("runtime.o", &cuda_runtime()?)?;
            let link =
                ["-shared", "-Wl,-Bsymbolic,-z,defs", "text.o", "runtime.o", "dynamic.s", "-lm"];
            workshop.run("", "g++", link.into_iter().chain(["-o", "kernels.so"]))?;
            workshop.read("kernels.so")
        })?;
        let kernels = cuda::kernels(&image).map_err(Failure::Refused)?;
        Ok(Self(Arc::new(Compiled { image, kernels, watched: cuda.watched })))
    }

    /// Compiles libraries of the Metal shading language, each a whole text. A library's kernels are
    /// those that it defines; their names are unique. Blocks on the compiler for seconds, or reads
    /// what it made of the same text before.
    ///
    /// # Errors
    /// [`Failure::Missing`] without clang. [`Failure::Refused`] with the compiler's messages, or
    /// for a signature that the emulator does not understand.
    pub fn metal(libraries: &[Source<'_>]) -> Result<Self, Failure> {
        let mut program = String::from("#include <metal_stdlib>\n");
        let mut files = Vec::new();
        let (mut cases, mut kernels) = (String::new(), Vec::new());
        for (i, library) in libraries.iter().enumerate() {
            let (text, found) = metal::translate(library.text)
                .map_err(|why| Failure::Refused(format!("{}: {why}", library.name)))?;
            let file = format!("library{i}.metal");
            let _ = write!(program, "namespace library{i} {{\n#include \"{file}\"\n}}\n");
            for kernel in found {
                cases.push_str(&kernel.case(&format!("library{i}"), kernels.len()));
                kernels.push(Kernel { name: kernel.name, threads: None, params: Vec::new() });
            }
            files.push((file, format!("#line 1 \"{}\"\n{text}", library.name)));
        }
        program.push_str(&metal::entry(&cases));
        files.push(("kernels.cpp".to_owned(), program));
        let files = files.iter().map(|(n, t)| (n.as_str(), t.as_str()));
        let files = HEADERS.into_iter().chain(files);
        let whole = files.clone().map(|(name, text)| format!("{name}\n{text}")).collect::<String>();
        let workshop = Workshop::new(files.map(|(name, text)| (name, text.as_bytes())))?;
        // The language is C++14 with extensions. Traps need no library of the compiler.
        let options = ["-std=c++14", CHECKS, "-fsanitize-trap=all", "-shared", "-Iinclude"];
        let output = ["kernels.cpp", "-o", "kernels.so"];
        let options: Vec<&str> = OPTIONS.into_iter().chain(options).chain(output).collect();
        let image = compile::kept("clang++", &options, &whole, || {
            workshop.run("", "clang++", &options)?;
            workshop.read("kernels.so")
        })?;
        Ok(Self(Arc::new(Compiled { image, kernels, watched: false })))
    }

    /// The kernels.
    #[must_use]
    pub fn kernels(&self) -> &[Kernel] {
        &self.0.kernels
    }
}

/// An operand of a launch: memory of the host.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// The address of its first byte.
    pub at: u64,
    /// The address that the launch was given for it, by which a tensor map names its memory. The
    /// same as `at` where no device has addresses of its own.
    pub device: u64,
    /// Its bytes.
    pub bytes: u64,
    /// The kernel may read it.
    pub reads: bool,
    /// The kernel may write it.
    pub writes: bool,
}

/// A launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel's name.
    pub kernel: &'a str,
    /// The operands, whose addresses are the first arguments.
    pub operands: &'a [Operand],
    /// The bytes of the other arguments.
    pub params: &'a [u8],
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block in each direction; 1,024 at most together.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// Blocks of a cluster in each direction; 16 at most together. A kernel whose source has
    /// clusters has those.
    pub cluster: [u32; 3],
    /// All blocks run at the same time, in turns; 64 at most. A thread that polls a word by atomic
    /// or volatile reads lets the others run.
    pub cooperative: bool,
    /// Blocks and threads run from the last to the first.
    pub reverse: bool,
}

/// A program with variables of its own. It is loaded for its first launch.
#[derive(Debug)]
pub struct Emulator {
    program: Program,
    /// One launch at a time, because a library has one block.
    library: Mutex<Option<Library>>,
}

impl Emulator {
    /// An emulator of a program. Loads nothing yet.
    #[must_use]
    pub fn new(program: Program) -> Self {
        Self { program, library: Mutex::new(None) }
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Runs a launch. Blocks until the launch is over, and while another thread's launch runs.
    ///
    /// # Errors
    /// A kernel that the program does not have, a launch without threads, arguments of another
    /// size; what the emulator finds in the kernel. After an error the operands hold what was
    /// written before.
    ///
    /// # Safety
    /// - The program is safe to load: what runs at that time, such as the initialiser of a
    ///   variable, accesses only the program's own memory.
    /// - The kernel accepts the launch: the memory that it accesses is live, and no other code
    ///   accesses the memory meanwhile. The checks of a watched program are an aid and no
    ///   guarantee.
    pub unsafe fn run(&self, launch: &Launch<'_>) -> Result<(), String> {
        let Launch { kernel, operands, params, grid, block, shared, cluster, cooperative, reverse } =
            *launch;
        let Compiled { image, kernels, .. } = &*self.program.0;
        let index = kernels
            .iter()
            .position(|k| k.name == kernel)
            .ok_or_else(|| format!("no emulated kernel is named {kernel}"))?;
        if grid.contains(&0) || block.contains(&0) {
            return Err(format!("kernel {kernel} with {grid:?} blocks of {block:?} threads"));
        }
        let size = operands.len() * 8 + params.len();
        let end = kernels[index].params.iter().map(|p| (p.offset + p.size) as usize).max();
        // The last parameter of a structure's layout may be followed by padding.
        if end.is_some_and(|end| size < end || size - end >= 8) {
            return Err(format!(
                "kernel {kernel} takes {} bytes of arguments, not {size}",
                end.unwrap_or(0)
            ));
        }
        // Parameters are aligned as in a launch, to the 64 bytes of a tensor map at most.
        #[repr(C, align(64))]
        #[derive(Clone, Copy)]
        struct Word([u8; 64]);
        let mut words = vec![Word([0; 64]); size.div_ceil(64)];
        let bytes = operands.iter().flat_map(|o| o.at.to_le_bytes()).chain(params.iter().copied());
        let places = words.iter_mut().flat_map(|w| &mut w.0);
        std::iter::zip(places, bytes).for_each(|(place, byte)| *place = byte);
        let operands: Vec<NativeOperand> = operands
            .iter()
            .map(|o| NativeOperand {
                at: o.at,
                device: o.device,
                bytes: o.bytes,
                access: u64::from(o.reads) | u64::from(o.writes) << 1,
            })
            .collect();
        let name = CString::new(kernel).unwrap_or_default();
        let mut native = NativeLaunch {
            kernel: name.as_ptr(),
            words: words.as_ptr().cast(),
            size,
            operands: operands.as_ptr(),
            operand_count: operands.len(),
            index: index as u32,
            grid,
            block,
            shared,
            reverse: u32::from(reverse),
            watched: u32::from(self.program.0.watched),
            cluster,
            cooperative: u32::from(cooperative),
            failed_at: 0,
        };
        let mut library = self.library.lock();
        let library = match &mut *library {
            Some(library) => library,
            // SAFETY: this crate compiled the image, and the caller vouches for its initialisers.
            none => none.insert(unsafe { Library::load(image) }?),
        };
        // SAFETY: the pointers are to the lists above, and the index is of this program. The caller
        // vouches for the kernel's accesses. The lock admits one launch.
        unsafe { library.run(&mut native) }
    }
}
