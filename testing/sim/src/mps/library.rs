//! Libraries and pipelines of the simulated driver. The compiler only searches the source for the
//! names of its kernels, whose functions are in the machine's registry.
//!
//! This module must not know which kernels exist.

use super::tables::{LibraryState, Object, PipelineState};
use super::{Effect, SimDriver, broken};
use leasehold_core::{Error, Result};
use leasehold_mps::driver::ops::{
    CompileOptions, LibraryOps, NativeDevice, NativeFunction, NativeLibrary, NativePipeline,
    PipelineDesc, PipelineInfo,
};
use std::path::Path;

/// Threads that run in step.
const SIMD_WIDTH: u32 = 32;
/// The first bytes of a compiled library.
const MAGIC: &[u8] = b"MTLB";

/// The source without comments.
fn bare(source: &str) -> Result<String, String> {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(at) = rest.find("/") {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let skip = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").ok_or("error: unterminated /* comment")? + 2
        } else {
            out.push('/');
            1
        };
        rest = &rest[skip..];
    }
    out.push_str(rest);
    Ok(out)
}

/// The names of the source's kernels, or the compiler's log.
fn kernels(source: &str) -> Result<Vec<String>, String> {
    let source = bare(source)?;
    if let Some(line) = source.lines().find(|l| l.trim_start().starts_with("#error")) {
        return Err(format!("program_source: error: {}", line.trim()));
    }
    if source.matches('{').count() != source.matches('}').count() {
        return Err("program_source: error: expected '}'".to_owned());
    }
    let mut words = source.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let mut names = Vec::new();
    while let Some(word) = words.next() {
        if word == "kernel" {
            let mut next = words.by_ref().filter(|w| !w.is_empty());
            if next.next() != Some("void") {
                return Err("program_source: error: kernel must return 'void'".to_owned());
            }
            names.extend(next.next().map(str::to_owned));
        }
    }
    Ok(names)
}

#[cold]
fn log(text: String) -> Error {
    Error::Compile { log: text.into_boxed_str() }
}

impl LibraryOps for SimDriver {
    unsafe fn library_from_source(
        &self,
        device: NativeDevice,
        source: &str,
        _: &CompileOptions,
    ) -> Result<NativeLibrary> {
        let device = self.lock().device(device)?;
        self.enter("newLibraryWithSource", device)?;
        let functions = kernels(source).map_err(log)?;
        let library = LibraryState { device, functions };
        Ok(NativeLibrary(self.lock().add(Object::Library(library))))
    }

    unsafe fn library_from_file(&self, device: NativeDevice, path: &Path) -> Result<NativeLibrary> {
        const API: &str = "newLibraryWithURL";
        let device = self.lock().device(device)?;
        self.enter(API, device)?;
        // The simulated format: the magic number, then the names of the functions, one a line.
        let bytes = std::fs::read(path).ok();
        let names = bytes.as_deref().and_then(|b| std::str::from_utf8(b.strip_prefix(MAGIC)?).ok());
        let Some(names) = names else {
            let name = format!("{} is no Metal library", path.display()).into_boxed_str();
            return Err(Error::Driver { api: API, code: 1, name });
        };
        let functions = names.lines().filter(|l| !l.is_empty()).map(str::to_owned).collect();
        let library = LibraryState { device, functions };
        Ok(NativeLibrary(self.lock().add(Object::Library(library))))
    }

    unsafe fn function_names(&self, library: NativeLibrary) -> Result<Vec<String>> {
        self.count("functionNames", self.device_of(library));
        Ok(self.lock().library(library.0)?.functions.clone())
    }

    unsafe fn function(&self, library: NativeLibrary, name: &str) -> Result<NativeFunction> {
        self.enter("newFunctionWithName", self.device_of(library))?;
        let mut tables = self.lock();
        let library = tables.library(library.0)?;
        let device = library.device;
        if !library.functions.iter().any(|f| f == name) {
            return Err(Error::NotFound(format!("function {name} in the Metal library").into()));
        }
        Ok(NativeFunction(tables.add(Object::Function(device, name.to_owned()))))
    }

    unsafe fn pipeline_create(
        &self,
        device: NativeDevice,
        function: NativeFunction,
        desc: &PipelineDesc,
    ) -> Result<NativePipeline> {
        let device = self.lock().device(device)?;
        self.enter("newComputePipelineStateWithDescriptor", device)?;
        let mut tables = self.lock();
        let name = match tables.objects.get(&function.0) {
            Some(Object::Function(own, name)) if *own == device => name.clone(),
            Some(Object::Function(..)) => {
                let text = "a pipeline of another device's function";
                return Err(broken(&mut tables, Effect::Abort, text));
            }
            _ => return Err(Error::NotFound("no function has this handle".into())),
        };
        let kernel = self.0.machine.kernels().get(&name);
        let kernel = kernel.ok_or_else(|| log(format!("no simulated kernel is named {name}")))?;
        let most = kernel.spec.block_threads;
        let info = PipelineInfo {
            max_threads: if desc.max_threads == 0 { most } else { most.min(desc.max_threads) },
            simd_width: SIMD_WIDTH,
            threadgroup_memory: 0,
        };
        let pipeline = PipelineState { device, kernel, info, indirect: desc.indirect };
        Ok(NativePipeline(tables.add(Object::Pipeline(pipeline))))
    }

    unsafe fn pipeline_info(&self, pipeline: NativePipeline) -> Result<PipelineInfo> {
        self.count("maxTotalThreadsPerThreadgroup", self.device_of(pipeline));
        Ok(self.lock().pipeline(pipeline.0)?.info)
    }
}
