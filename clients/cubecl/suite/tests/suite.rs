//! CubeCL's own tests, by the macros that its CUDA runtime calls.

#![expect(unexpected_cfgs, reason = "the macros ask for features of their own package")]

mod tests {
    pub type TestRuntime = cubecl_cuda::CudaRuntime;

    pub use half::{bf16, f16};

    cubecl_core::testgen_all!(f32: [f16, bf16, f32, f64], i32: [i8, i16, i32, i64], u32: [u8, u16, u32, u64]);
    cubecl_core::testgen_launch_dynamic_count!();
    cubecl_std::testgen!();
    cubecl_std::testgen_tensor_identity!([f16, bf16, f32, u32]);
    cubecl_std::testgen_quantized_view!(f16);
    cubecl_core::testgen_complex_validation!();
    cubecl_core::testgen_profiling!();
    cubecl_core::testgen_profiling_nested!();
}
