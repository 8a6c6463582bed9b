//! Libraries, functions and compute pipelines.
//!
//! This module must not know managers.

use super::super::ops::{
    CompileOptions, LibraryOps, NativeDevice, NativeFunction, NativeLibrary, NativePipeline,
    PipelineDesc, PipelineInfo,
};
use super::{RealDriver, at, failed, give, small};
use leasehold_core::{Error, Result};
use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol};
use objc2::{msg_send, sel};
use objc2_foundation::{NSDictionary, NSError, NSString, NSURL};
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineDescriptor, MTLComputePipelineState, MTLDevice,
    MTLFunction, MTLLanguageVersion, MTLLibrary, MTLMathMode, MTLPipelineOption,
};
use std::path::Path;

/// The compiler's error.
fn log(error: &NSError) -> Error {
    Error::Compile { log: error.localizedDescription().to_string().into_boxed_str() }
}

/// Metal's compile options.
fn options(of: &CompileOptions) -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    if options.respondsToSelector(sel!(setMathMode:)) {
        options.setMathMode(if of.fast_math { MTLMathMode::Fast } else { MTLMathMode::Safe });
    } else {
        // SAFETY: every system before `mathMode` has this setter of a boolean.
        let () = unsafe { msg_send![&*options, setFastMathEnabled: of.fast_math] };
    }
    if let Some((major, minor)) = of.language {
        let version = (usize::from(major) << 16) + usize::from(minor);
        options.setLanguageVersion(MTLLanguageVersion(version));
    }
    if !of.macros.is_empty() {
        let names: Vec<_> = of.macros.iter().map(|(name, _)| NSString::from_str(name)).collect();
        let names: Vec<&NSString> = names.iter().map(|name| &**name).collect();
        let value = |(_, value): &(String, String)| -> Retained<NSObject> {
            Retained::into_super(NSString::from_str(value))
        };
        let values: Vec<_> = of.macros.iter().map(value).collect();
        let macros = NSDictionary::from_retained_objects(&names, &values);
        // SAFETY: names and values are strings, as the property demands.
        unsafe { options.setPreprocessorMacros(Some(&macros)) };
    }
    options
}

impl LibraryOps for RealDriver {
    unsafe fn library_from_source(
        &self,
        device: NativeDevice,
        source: &str,
        options: &CompileOptions,
    ) -> Result<NativeLibrary> {
        self.enter(|| {
            let (source, options) = (NSString::from_str(source), self::options(options));
            let device = at!(device => MTLDevice);
            let library = device.newLibraryWithSource_options_error(&source, Some(&options));
            library.map(|l| NativeLibrary(give(l))).map_err(|e| log(&e))
        })
    }

    unsafe fn library_from_file(&self, device: NativeDevice, path: &Path) -> Result<NativeLibrary> {
        self.enter(|| {
            let url = NSURL::from_file_path(path)
                .ok_or_else(|| Error::invalid(format!("{} is no path", path.display())))?;
            let library = at!(device => MTLDevice).newLibraryWithURL_error(&url);
            library.map(|l| NativeLibrary(give(l))).map_err(|e| failed("newLibraryWithURL", &e))
        })
    }

    unsafe fn function_names(&self, library: NativeLibrary) -> Result<Vec<String>> {
        self.enter(|| {
            let names = at!(library => MTLLibrary).functionNames();
            Ok(names.iter().map(|name| name.to_string()).collect())
        })
    }

    unsafe fn function(&self, library: NativeLibrary, name: &str) -> Result<NativeFunction> {
        self.enter(|| {
            let library = at!(library => MTLLibrary);
            let function = library.newFunctionWithName(&NSString::from_str(name));
            function.map(|f| NativeFunction(give(f))).ok_or_else(|| {
                Error::NotFound(format!("function {name} in the Metal library").into())
            })
        })
    }

    unsafe fn pipeline_create(
        &self,
        device: NativeDevice,
        function: NativeFunction,
        desc: &PipelineDesc,
    ) -> Result<NativePipeline> {
        self.enter(|| {
            let options = MTLComputePipelineDescriptor::new();
            options.setLabel(Some(&NSString::from_str(&desc.label)));
            options.setComputeFunction(Some(at!(function => MTLFunction)));
            options.setSupportIndirectCommandBuffers(desc.indirect);
            if desc.max_threads != 0 {
                options.setMaxTotalThreadsPerThreadgroup(desc.max_threads as usize);
            }
            let device = at!(device => MTLDevice);
            let pipeline = device.newComputePipelineStateWithDescriptor_options_reflection_error(
                &options,
                MTLPipelineOption::None,
                None,
            );
            pipeline.map(|p| NativePipeline(give(p))).map_err(|e| log(&e))
        })
    }

    unsafe fn pipeline_info(&self, pipeline: NativePipeline) -> Result<PipelineInfo> {
        self.enter(|| {
            let pipeline = at!(pipeline => MTLComputePipelineState);
            Ok(PipelineInfo {
                max_threads: small(pipeline.maxTotalThreadsPerThreadgroup()),
                simd_width: small(pipeline.threadExecutionWidth()),
                threadgroup_memory: small(pipeline.staticThreadgroupMemoryLength()),
            })
        })
    }
}
