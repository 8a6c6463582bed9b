//! Plain values that may be copied to and from a device byte by byte.

/// A type of which every byte pattern is a value, without padding.
///
/// # Safety
/// - Every byte pattern of its size is a valid value, and it has no padding.
///
/// ```
/// use leasehold::Pod;
/// #[derive(Clone, Copy)]
/// #[repr(C)]
/// struct Params {
///     rows: u32,
///     scale: f32,
/// }
/// // SAFETY: two words without padding, of which every pattern is a value.
/// unsafe impl Pod for Params {}
/// assert_eq!(Params { rows: 1, scale: 0.0 }.as_bytes().len(), 8);
/// ```
pub unsafe trait Pod: Copy + Send + Sync + 'static {
    /// Its bytes: how parameters are given to a kernel.
    fn as_bytes(&self) -> &[u8]
    where
        Self: Sized,
    {
        bytes(std::slice::from_ref(self))
    }
}

macro_rules! pod {
    // SAFETY: integers and floats have neither padding nor invalid patterns.
    ($($t:ty),*) => { $(
        // SAFETY: integers and floats have neither padding nor invalid patterns.
        unsafe impl Pod for $t {}
    )* };
}
pod!(u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64);

// SAFETY: an array of such values has no padding of its own.
unsafe impl<T: Pod, const N: usize> Pod for [T; N] {}

/// The bytes of a slice.
pub(crate) fn bytes<T: Pod>(values: &[T]) -> &[u8] {
    // SAFETY: no padding, so all bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of a slice, to write.
pub(crate) fn bytes_mut<T: Pod>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: no padding, and every byte pattern is a value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
