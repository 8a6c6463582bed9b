//! Modules of the simulated driver. The loader only searches PTX and machine code for their entry
//! points, whose code is in the machine's registry.
//!
//! The compiler searches CUDA C++ for its kernels' names. If the registry has a function for each
//! of them, that is all. Otherwise the emulator compiles the source, and the image names the
//! emulated program. Nothing of a program runs before the launch of one of its kernels.
//!
//! This module must not know which kernels exist.

use super::tables::{Function, Module};
use super::{SimDriver, memory, refuse};
use crate::machine::tensor_map;
use crate::{Kernel, KernelBody, KernelRegistry, KernelSpec};
use leasehold_core::sync::Mutex;
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::codes::{self, code};
use leasehold_cuda::driver::ops::{
    FunctionInfo, Launch, ModuleOps, NativeFunction, NativeModule, NativeTensorMap,
};
use leasehold_emulator::{Cuda, Emulator, Failure, Operand, Param, Program, Source};
use leasehold_hal::{Access, Binding, KernelDesc, Pipeline, TensorMap};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;

/// The line of an image that names an emulated program.
const PROGRAM: &str = "// Emulated program ";

/// The origin of a program of this process: source, name, options, architecture.
type ProgramKey = (String, String, Vec<String>, (u32, u32));

/// The emulated programs of this process, by the numbers in their images. They stay, so that a
/// source is compiled once.
static PROGRAMS: Mutex<Vec<(ProgramKey, Program)>> = Mutex::new(Vec::new());

/// The text with each comment, string and character literal replaced by a space.
fn bare(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skip = if rest.starts_with("//") {
            Some(rest.find('\n').unwrap_or(rest.len()))
        } else if let Some(body) = rest.strip_prefix("/*") {
            Some(body.find("*/").ok_or("a comment does not end")? + 4)
        } else if first == '"' || first == '\'' {
            Some(literal(rest, first).ok_or("a literal does not end")?)
        } else {
            None
        };
        match skip {
            Some(bytes) => {
                out.push(' ');
                rest = &rest[bytes..];
            }
            None => {
                out.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    Ok(out)
}

/// The bytes of a literal, including its quotes.
fn literal(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\n' => return None,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Checks that brackets of all kinds close in the reverse order of their opening.
fn balanced(text: &str) -> Result<(), String> {
    let mut open = Vec::new();
    for (line, text) in text.lines().enumerate() {
        for c in text.chars() {
            match c {
                '(' | '[' | '{' => open.push(c),
                ')' | ']' | '}' => {
                    let want = match c {
                        ')' => '(',
                        ']' => '[',
                        _ => '{',
                    };
                    if open.pop() != Some(want) {
                        return Err(format!("line {}: unexpected {c}", line + 1));
                    }
                }
                _ => {}
            }
        }
    }
    open.pop().map_or(Ok(()), |c| Err(format!("{c} is never closed")))
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

/// The names that follow `word` in a text without literals.
fn names_after<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(word).filter_map(move |(at, _)| {
        let whole = !text[..at].ends_with(is_name);
        let rest = text[at + word.len()..].trim_start();
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        (whole && end > 0).then(|| &rest[..end])
    })
}

/// The entry points of a PTX text, or a code with a log.
fn entries(image: &[u8]) -> Result<BTreeSet<String>, (i32, String)> {
    if image.starts_with(b"\x7fELF") {
        return Err((code::INVALID_IMAGE, "machine code, not PTX".to_owned()));
    }
    let text = std::str::from_utf8(image)
        .map_err(|_| (code::INVALID_IMAGE, "neither text nor machine code".to_owned()))?;
    let text = text.trim_end_matches('\0');
    let invalid = |why: &str| (code::INVALID_PTX, format!("ptxas fatal: {why}"));
    let bare = bare(text).map_err(|why| invalid(&why))?;
    if !bare.contains(".version") {
        return Err((code::INVALID_IMAGE, "no PTX".to_owned()));
    }
    for directive in [".version", ".target"] {
        if names_or_numbers_after(&bare, directive).is_none() {
            return Err(invalid(&format!("missing {directive} directive")));
        }
    }
    balanced(&bare).map_err(|why| invalid(&why))?;
    Ok(names_after(&bare, ".entry").map(str::to_owned).collect())
}

/// The entry points of machine code, if a device of `compute_capability` runs it: an ELF file of
/// 64 bits has a section `.text.NAME` for each, and the architecture in its flags.
fn cubin_entries(
    image: &[u8],
    (major, minor): (u32, u32),
) -> Result<BTreeSet<String>, (i32, String)> {
    let invalid = || (code::INVALID_IMAGE, "no whole machine code".to_owned());
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let mut wide = [0; 8];
        wide[..bytes].copy_from_slice(image.get(at..at.checked_add(bytes)?)?);
        usize::try_from(u64::from_le_bytes(wide)).ok()
    };
    // Offset and size of each section's name, from the tables that the header names.
    let names = || {
        let (sections, each) = (number(40, 8)?, number(58, 2)?);
        let (count, names) = (number(60, 2)?, number(62, 2)?);
        let header = |index: usize| sections.checked_add(index.checked_mul(each)?);
        let table = number(header(names)?.checked_add(24)?, 8)?;
        let mut found = BTreeSet::new();
        for index in 0..count {
            let name = image.get(table.checked_add(number(header(index)?, 4)?)?..)?;
            let end = name.iter().position(|&byte| byte == 0)?;
            let name = std::str::from_utf8(&name[..end]).ok()?;
            found.extend(name.strip_prefix(".text.").map(str::to_owned));
        }
        Some(found)
    };
    if !image.starts_with(b"\x7fELF\x02\x01") {
        return Err(invalid());
    }
    let architecture = number(48, 4).ok_or_else(invalid)? >> 8 & 0xFF;
    let of = (architecture as u32 / 10, architecture as u32 % 10);
    if of.0 != major || of.1 > minor {
        return Err((code::NO_BINARY_FOR_GPU, format!("machine code for sm_{architecture}")));
    }
    names().ok_or_else(invalid)
}

fn names_or_numbers_after<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    let at = text.find(word)? + word.len();
    text[at..].split_whitespace().next()
}

/// The names of the kernels of a CUDA C++ text, in order.
fn kernels(source: &str) -> Result<Vec<String>, String> {
    let bare = bare(source)?;
    balanced(&bare)?;
    let mut found = Vec::new();
    for (at, _) in bare.match_indices("__global__") {
        let rest = &bare[at..];
        // The name precedes the first parenthesis that belongs to no attribute.
        let mut from = 0;
        let name = loop {
            let open = rest[from..].find('(').ok_or("a kernel has no parameters")? + from;
            let head = rest[..open].trim_end();
            let start = head.rfind(|c| !is_name(c)).map_or(0, |at| at + 1);
            let name = &head[start..];
            if !name.starts_with("__") {
                break name;
            }
            from = open + rest[open..].find(')').ok_or("an attribute does not end")?;
        };
        if name.is_empty() {
            return Err("a kernel has no name".to_owned());
        }
        found.push(name.to_owned());
    }
    if found.is_empty() { Err("no kernel".to_owned()) } else { Ok(found) }
}

/// Compiles CUDA C++ to a text that [`ModuleOps::module_load`] of the simulated driver takes. In
/// one process the same source gives the same text.
pub(super) fn compile(
    source: &str,
    name: &str,
    options: &[String],
    (major, minor): (u32, u32),
    registry: &KernelRegistry,
) -> Result<Vec<u8>> {
    let mut text = String::from("// Made by the simulated compiler.\n");
    for option in options {
        // The option must not end the comment.
        let _ = writeln!(text, "// {}", option.replace('\n', " "));
    }
    let names = kernels(source);
    let registered = |names: &Vec<String>| names.iter().all(|name| registry.get(name).is_some());
    let names = match names.as_ref().ok().filter(|names| registered(names)) {
        Some(names) => names.clone(),
        None => {
            let (number, program) = match emulated(source, name, options, (major, minor)) {
                Ok(made) => made,
                Err(Failure::Refused(log)) => return Err(Error::Compile { log: log.into() }),
                Err(Failure::Missing(why)) => {
                    return Err(match names {
                        Err(log) => Error::Compile { log: format!("{name}: error: {log}").into() },
                        Ok(names) => Error::Unavailable(
                            format!(
                                "the simulated CUDA driver compiles kernels with g++: {why}; install g++ on Linux, or register functions named {} with \
                                 the machine (KernelRegistry)",
                                names.join(", ")
                            )
                            .into(),
                        ),
                    });
                }
            };
            let _ = writeln!(text, "{PROGRAM}{number}");
            let named = program.kernels().iter().filter(|k| !k.name.is_empty());
            named.map(|k| k.name.clone()).collect()
        }
    };
    let _ = writeln!(text, ".version 9.0\n.target sm_{major}{minor}\n.address_size 64");
    for name in names {
        let _ = writeln!(text, ".visible .entry {name}() {{ ret; }}");
    }
    Ok(text.into_bytes())
}

/// The emulated program of a source, and its number.
fn emulated(
    text: &str,
    name: &str,
    options: &[String],
    capability: (u32, u32),
) -> std::result::Result<(usize, Program), Failure> {
    let key: ProgramKey = (text.to_owned(), name.to_owned(), options.to_vec(), capability);
    let known = |all: &[(ProgramKey, Program)]| {
        all.iter().position(|(k, _)| *k == key).map(|at| (at, all[at].1.clone()))
    };
    if let Some(known) = known(&PROGRAMS.lock()) {
        return Ok(known);
    }
    let (major, minor) = capability;
    let mut all = options.to_vec();
    all.push(format!("-D__CUDA_ARCH__={major}{minor}0"));
    let cuda = Cuda { source: Source { name, text }, options: &all, watched: true };
    let program = Program::cuda(&cuda)?;
    let mut programs = PROGRAMS.lock();
    // Another thread may have been quicker.
    Ok(known(&programs).unwrap_or_else(|| {
        programs.push((key.clone(), program.clone()));
        (programs.len() - 1, program)
    }))
}

/// The emulated program that an image names.
fn program_of(image: &[u8]) -> Option<Program> {
    let text = std::str::from_utf8(image).ok()?;
    let number = text.lines().find_map(|line| line.strip_prefix(PROGRAM))?.parse::<usize>().ok()?;
    Some(PROGRAMS.lock().get(number)?.1.clone())
}

/// An emulated kernel for the machine. The bindings are the pointers, which come first.
///
/// # Errors
/// `InvalidArgument` for a pointer behind another parameter.
fn emulated_kernel(emulator: &Arc<Emulator>, index: usize, reverse: bool) -> Result<KernelSpec> {
    let kernel = &emulator.program().kernels()[index];
    let params = &kernel.params;
    let pointers = params.iter().take_while(|p| p.pointer).count();
    if let Some(at) = params.iter().skip(pointers).position(|p| p.pointer) {
        return Err(Error::invalid(format!(
            "kernel {}: its parameter {} is a pointer behind another parameter, so no binding can be it; let its pointers come first",
            kernel.name,
            pointers + at
        )));
    }
    let end = params.last().map_or(0, |p: &Param| p.offset + p.size);
    let from = params.get(pointers).map_or(8 * pointers as u32, |p| p.offset);
    let gap = from as usize - 8 * pointers;
    let (emulator, name) = (emulator.clone(), kernel.name.clone());
    let body = KernelBody::run(move |launch| {
        let operand = |(b, given): (&Binding, &Binding)| Operand {
            at: b.addr,
            device: given.addr,
            bytes: b.len,
            reads: b.access.reads(),
            writes: b.access.writes(),
        };
        let bindings = std::iter::zip(launch.bindings(), launch.given());
        let operands: Vec<Operand> = bindings.map(operand).collect();
        // The bytes behind the addresses: a gap in front of tensor maps, then the parameters.
        let params = [&vec![0; gap][..], launch.params_bytes()].concat();
        let launch = leasehold_emulator::Launch {
            kernel: &name,
            operands: &operands,
            params: &params,
            grid: launch.grid(),
            block: launch.block(),
            shared: launch.shared(),
            cluster: launch.cluster(),
            cooperative: launch.is_cooperative(),
            reverse,
        };
        // SAFETY: who gives a launch to a driver vouches for the kernel's code. The machine has
        // translated the bindings for the duration of the call, and no other code runs meanwhile.
        unsafe { emulator.run(&launch) }.map_err(Error::state)
    });
    let mut spec =
        KernelSpec::new(&vec![Access::ReadWrite; pointers], end.saturating_sub(from), body);
    // A first parameter that is aligned as a tensor map.
    let first = params.get(pointers);
    spec.maps = first.is_some_and(|p| {
        p.offset.is_multiple_of(TensorMap::ALIGNMENT) && p.size >= TensorMap::BYTES
    });
    // The source says nothing of the order within a binding.
    spec.writes_first = true;
    spec.block_threads = kernel.threads.unwrap_or(memory::BLOCK_THREADS);
    Ok(spec)
}

/// The blocks of a launch that a multiprocessor of compute capability 9.0 runs at the same time.
fn resident(launch: &Launch<'_>) -> u32 {
    const THREADS: u32 = 2048;
    const BLOCKS: u32 = 32;
    const SHARED: u32 = 228 << 10;
    let threads = launch.block.iter().fold(1_u32, |n, &b| n.saturating_mul(b)).max(1);
    if threads > memory::BLOCK_THREADS {
        return 0;
    }
    let of_shared = SHARED / launch.shared.saturating_add(1024);
    (THREADS / threads.next_multiple_of(32)).min(BLOCKS).min(of_shared)
}

impl SimDriver {
    /// Checks a launch's attributes as the driver does.
    pub(super) fn check_attributes(&self, api: &'static str, launch: &Launch<'_>) -> Result<()> {
        let Some(&Pipeline { cluster, cooperative, .. }) = launch.attributes else {
            return Ok(());
        };
        let most = self.lock().functions.get(&launch.function.0).map_or(0, |f| f.cluster);
        let size = cluster.iter().fold(1_u32, |n, &b| n.saturating_mul(b));
        if cluster != [1; 3] {
            if self.config.compute_capability.0 < super::CLUSTERS {
                return Err(refuse(api, code::NOT_SUPPORTED));
            }
            let fits = (0..3).all(|i| cluster[i] != 0 && launch.grid[i].is_multiple_of(cluster[i]));
            if !fits || size > most {
                return Err(refuse(api, code::INVALID_CLUSTER_SIZE));
            }
        }
        let blocks = launch.grid.iter().fold(1_u64, |n, &b| n.saturating_mul(b.into()));
        let room = u64::from(resident(launch)) * u64::from(self.config.machine.units);
        if cooperative && !self.config.cooperative_launch {
            return Err(refuse(api, code::NOT_SUPPORTED));
        }
        if cooperative && blocks > room {
            return Err(refuse(api, code::COOPERATIVE_LAUNCH_TOO_LARGE));
        }
        Ok(())
    }

    /// Loads an image whose entry points `entries` finds.
    fn load_image(
        &self,
        image: &[u8],
        entries: impl FnOnce(&[u8]) -> Result<BTreeSet<String>, (i32, String)>,
    ) -> Result<NativeModule> {
        const API: &str = "cuModuleLoadDataEx";
        let scope = self.enter(API)?;
        self.lock().forbidden_in_capture(API)?;
        if image.is_empty() {
            return Err(Error::Compile { log: "the image is empty".into() });
        }
        let entries = entries(image).map_err(|(code, why)| Error::Compile {
            log: format!("{} ({code}): {why}", codes::name_or_number(code)).into(),
        })?;
        let emulator = program_of(image).map(|program| Arc::new(Emulator::new(program)));
        let mut tables = self.lock();
        let handle = tables.handle();
        tables.modules.insert(handle, Module { context: scope.context, entries, emulator });
        Ok(NativeModule(handle))
    }
}

impl ModuleOps for SimDriver {
    fn module_load(&self, image: &[u8]) -> Result<NativeModule> {
        self.load_image(image, entries)
    }

    unsafe fn module_load_cubin(&self, image: &[u8]) -> Result<NativeModule> {
        self.load_image(image, |image| cubin_entries(image, self.config.compute_capability))
    }

    unsafe fn module_unload(&self, module: NativeModule) -> Result<()> {
        const API: &str = "cuModuleUnload";
        let (scope, told) = self.enter_teardown(API)?;
        let mut tables = self.lock();
        match tables.modules.get(&module.0) {
            Some(found) if found.context == scope.context => {}
            Some(_) => return Err(refuse(API, code::INVALID_CONTEXT)),
            None => return Err(refuse(API, code::INVALID_HANDLE)),
        }
        // Here the driver's behaviour is undefined. The refused module shows in the census.
        let used = |f: &Function| f.module == module.0 && self.machine.is_kernel_used(&f.kernel);
        if tables.functions.values().any(used) {
            return Err(refuse(API, code::ILLEGAL_STATE));
        }
        tables.modules.remove(&module.0);
        tables.functions.retain(|_, f| f.module != module.0);
        told
    }

    unsafe fn module_function(
        &self,
        module: NativeModule,
        name: &str,
        limits: &[(u32, u32)],
    ) -> Result<NativeFunction> {
        const API: &str = "cuModuleGetFunction";
        let scope = self.enter(API)?;
        let mut tables = self.lock();
        let found =
            tables.modules.get(&module.0).ok_or_else(|| refuse(API, code::INVALID_HANDLE))?;
        if found.context != scope.context {
            return Err(refuse(API, code::INVALID_CONTEXT));
        }
        if name.is_empty() {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        if !found.entries.contains(name) {
            return Err(Error::NotFound(format!("the module has no function {name}").into()));
        }
        let own = self.conditions.kernel(name);
        let registered = own.or_else(|| Some(self.machine.kernels().get(name)?.spec.clone()));
        let emulated = found.emulator.as_ref().and_then(|emulator| {
            let at = emulator.program().kernels().iter().position(|k| k.name == name)?;
            Some((emulator.clone(), at))
        });
        if registered.is_none() && emulated.is_none() {
            return Err(Error::NotFound(
                format!(
                    "function {name} is in the module, but the simulated driver runs no PTX and no machine code; give the kernel's source \
                     (KernelSource::CudaC), or register a function named {name} with the machine (KernelRegistry)"
                )
                .into(),
            ));
        }
        // The driver returns the same handle for the same name. The limits it does not know.
        let is_it =
            |f: &Function| f.module == module.0 && *f.kernel.name == *name && f.limits == limits;
        let known = tables.functions.iter().find(|(_, f)| is_it(f));
        if let Some((&known, _)) = known {
            return Ok(NativeFunction(known));
        }
        let (mut spec, params) = match (registered, emulated) {
            (Some(spec), _) => (spec, None),
            (None, Some((emulator, at))) => {
                let spec = emulated_kernel(&emulator, at, self.config.reverse)?;
                (spec, Some(emulator.program().kernels()[at].params.clone()))
            }
            (None, None) => return Err(refuse(API, code::INVALID_HANDLE)),
        };
        if spec.limits.is_empty() {
            spec.limits = limits.to_vec();
        }
        let handle = tables.handle();
        // Of its own, so that the machine can tell whether the function is used.
        let kernel = Arc::new(Kernel { name: name.into(), spec });
        let (shared, limits) = (memory::SHARED, limits.to_vec());
        let (module, context, cluster) = (module.0, scope.context, KernelDesc::PORTABLE_CLUSTER);
        let function = Function { module, context, kernel, shared, params, limits, cluster };
        tables.functions.insert(handle, function);
        Ok(NativeFunction(handle))
    }

    unsafe fn function_info(&self, function: NativeFunction) -> Result<FunctionInfo> {
        const API: &str = "cuFuncGetAttribute";
        self.enter(API)?;
        let tables = self.lock();
        let found =
            tables.functions.get(&function.0).ok_or_else(|| refuse(API, code::INVALID_HANDLE))?;
        let spec = &found.kernel.spec;
        let params = match &found.params {
            Some(params) => {
                let pointers = spec.bindings.len();
                let host = params.get(pointers).map_or(0, |p| p.offset);
                let place = |(i, p): (usize, &Param)| match i {
                    i if i < pointers => (p.offset, p.size),
                    _ => (p.offset - host + spec.params_at() as u32, p.size),
                };
                params.iter().enumerate().map(place).collect()
            }
            None => {
                let pointers = (0..spec.bindings.len() as u32).map(|i| (i * 8, 8));
                let rest = (spec.params_at() as u32, spec.params);
                let word = (rest.0 + rest.1, size_of::<u32>() as u32);
                let rest = [(spec.params > 0).then_some(rest), spec.early.then_some(word)];
                pointers.chain(rest.into_iter().flatten()).collect()
            }
        };
        let (major, minor) = self.config.compute_capability;
        Ok(FunctionInfo {
            block_threads: spec.block_threads.min(memory::BLOCK_THREADS),
            registers: 32,
            shared: 0,
            local: 0,
            params: self.config.param_info.then_some(params),
            binary: major * 10 + minor,
            source: major * 10 + minor,
        })
    }

    unsafe fn function_allow_shared(&self, function: NativeFunction, bytes: u32) -> Result<()> {
        const API: &str = "cuFuncSetAttribute";
        self.enter(API)?;
        let mut tables = self.lock();
        let found = tables
            .functions
            .get_mut(&function.0)
            .ok_or_else(|| refuse(API, code::INVALID_HANDLE))?;
        if bytes > memory::SHARED_OPTIN {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        // Sizes up to the default need no request.
        found.shared = bytes.max(memory::SHARED);
        Ok(())
    }

    unsafe fn function_allow_clusters(&self, function: NativeFunction) -> Result<()> {
        const API: &str = "cuFuncSetAttribute";
        self.enter(API)?;
        let mut tables = self.lock();
        let found = tables.functions.get_mut(&function.0);
        found.ok_or_else(|| refuse(API, code::INVALID_HANDLE))?.cluster = KernelDesc::CLUSTER;
        Ok(())
    }

    unsafe fn occupancy(&self, launch: &Launch<'_>) -> Result<u32> {
        const API: &str = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        self.enter(API)?;
        if !self.lock().functions.contains_key(&launch.function.0) {
            return Err(refuse(API, code::INVALID_HANDLE));
        }
        let blocks = resident(launch);
        Ok(match launch.attributes {
            None => blocks,
            Some(with) => blocks * self.config.machine.units / with.cluster.iter().product::<u32>(),
        })
    }

    fn tensor_map(&self, addr: u64, map: &TensorMap) -> Result<NativeTensorMap> {
        const API: &str = "cuTensorMapEncodeTiled";
        self.enter(API)?;
        if !addr.is_multiple_of(map.alignment()) || map.validate().is_err() {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        Ok(NativeTensorMap(tensor_map::encode(addr, map)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_points_of_ptx() {
        let ptx = b".version 9.0\n.target sm_75\n// .entry no\n.visible .entry add(\n.param .u64 a) { ret; }\n.entry sub(){ret;}\0";
        assert_eq!(entries(ptx).unwrap().into_iter().collect::<Vec<_>>(), ["add", "sub"]);
        for bad in [
            &b"hello"[..],
            b".version 9.0\n",
            b".version 9.0 .target sm_75 .entry f() {",
            b"\xff\xfe",
            b"\x7fELF",
        ] {
            assert!(entries(bad).is_err(), "{bad:?}");
        }
    }

    /// An ELF file of these sections, for an architecture.
    fn elf(architecture: u32, sections: &[&str]) -> Vec<u8> {
        let names: Vec<u8> = sections.iter().flat_map(|s| [s.as_bytes(), b"\0"].concat()).collect();
        let mut image = b"\x7fELF\x02\x01".to_vec();
        image.resize(64, 0);
        image[48..52].copy_from_slice(&(architecture << 8 | 2).to_le_bytes());
        image[40..48].copy_from_slice(&(64 + names.len() as u64).to_le_bytes());
        let counts = [64, sections.len() as u16, 0];
        for (at, count) in [58, 60, 62].into_iter().zip(counts) {
            image[at..at + 2].copy_from_slice(&count.to_le_bytes());
        }
        image.extend(&names);
        let mut name = 0_u32;
        for section in sections {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[24..32].copy_from_slice(&64_u64.to_le_bytes());
            image.extend(header);
            name += section.len() as u32 + 1;
        }
        image
    }

    #[test]
    fn entry_points_of_machine_code() {
        let image = elf(80, &[".shstrtab", ".text.add", ".nv.info.add", ".text.sub"]);
        for device in [(8, 0), (8, 9)] {
            let found = cubin_entries(&image, device).unwrap();
            assert_eq!(found.into_iter().collect::<Vec<_>>(), ["add", "sub"]);
        }
        for (image, device, code) in [
            (&image[..], (7, 5), code::NO_BINARY_FOR_GPU),
            (&image[..], (9, 0), code::NO_BINARY_FOR_GPU),
            (&elf(86, &[".text.f"])[..], (8, 0), code::NO_BINARY_FOR_GPU),
            (&image[..image.len() - 64], (8, 0), code::INVALID_IMAGE),
            (&image[..70], (8, 0), code::INVALID_IMAGE),
            (&image[..6], (8, 0), code::INVALID_IMAGE),
            (b".version 9.0", (8, 0), code::INVALID_IMAGE),
        ] {
            assert_eq!(cubin_entries(image, device).unwrap_err().0, code, "{image:?}");
        }
        // No header field leads outside of the file or to a panic.
        for at in 40..64 {
            let mut wrong = image.clone();
            wrong[at] = 0xFF;
            let _ = cubin_entries(&wrong, (8, 0));
        }
    }

    #[test]
    fn kernels_of_cuda_c() {
        let source = r#"
            // __global__ void no() {}
            extern "C" __global__ void __launch_bounds__(64, 2) first(float* a) { if (a[0] > 1.0f) { a[0] = '('; } }
            extern "C" __global__ void second() {}
        "#;
        assert_eq!(kernels(source).unwrap(), ["first", "second"]);
        let registry = KernelRegistry::new();
        for name in ["first", "second"] {
            let body = KernelBody::run(|_| Ok(()));
            registry.register(name, KernelSpec::new(&[], 0, body));
        }
        let compile = |source| compile(source, "k.cu", &["-O3".to_owned()], (9, 0), &registry);
        let ptx = compile(source).unwrap();
        assert_eq!(entries(&ptx).unwrap().len(), 2);
        assert!(program_of(&ptx).is_none());
        assert_eq!(ptx, compile(source).unwrap());
        for bad in [
            "",
            "int x;",
            "__global__ void f( {",
            "__global__ void f() { ] }",
            "/* __global__ void f() {}",
        ] {
            assert!(matches!(compile(bad), Err(Error::Compile { .. })), "{bad}");
        }
    }
}
