//! The reason why a library cannot be loaded: it is missing, or it is present and cannot be used.
//!
//! This module must not know what the library is.

/// The system loader's message about the first of these libraries that is present and cannot be
/// loaded. `None` if all of them are missing.
#[cfg(unix)]
pub(super) fn refusal(names: impl IntoIterator<Item = String>) -> Option<String> {
    use std::ffi::{CStr, CString};
    names.into_iter().find_map(|name| {
        let path = CString::new(name.as_str()).ok()?;
        // SAFETY: the name ends with a zero. Loading runs the library's initialisers, which the
        // caller asks for.
        let loaded = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !loaded.is_null() {
            // The library was installed just now: the next start finds it.
            // SAFETY: the handle came from `dlopen`, once.
            unsafe { libc::dlclose(loaded) };
            return None;
        }
        // SAFETY: the call has no arguments. The text is this thread's until its next call of the
        // loader.
        let text = unsafe { libc::dlerror() };
        if text.is_null() {
            return None;
        }
        // SAFETY: the loader's text ends with a zero.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        (!is_absent(&name, &text))
            .then(|| text.chars().filter(|c| !c.is_control()).take(300).collect())
    })
}

/// On other systems the loader is not asked again.
#[cfg(not(unix))]
pub(super) fn refusal(_: impl IntoIterator<Item = String>) -> Option<String> {
    None
}

/// Whether the loader says that the library itself is missing, and not one of its dependencies.
#[cfg(unix)]
fn is_absent(name: &str, text: &str) -> bool {
    // glibc names the missing library first, musl names the library that needs it last.
    let missing = text.contains("No such file")
        || text.contains("no such file")
        || text.contains("image not found");
    missing && text.contains(name) && !text.contains("needed by")
}

#[cfg(all(test, unix))]
#[path = "../../tests/unit/loader.rs"]
mod tests;
