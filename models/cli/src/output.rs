//! Output files: opened before the work whose results they take, and written once.
//!
//! A regular file is replaced completely or not at all. A pipe, a device and standard output are
//! written through. No output may be an input, standard output or another output.

use crate::failure::Failure;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The temporary names that are tried for one file.
const NAMES: u32 = 1000;

/// The files that a command reads, so that no output replaces one of them.
#[derive(Default)]
pub struct Inputs(Vec<Metadata>);

impl Inputs {
    /// Adds a file. A file that cannot be looked at is not added.
    pub fn file(mut self, path: &Path) -> Self {
        self.0.extend(fs::metadata(path));
        self
    }

    /// All files of a folder. A folder that cannot be looked at has none.
    pub fn folder(path: &Path) -> Self {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        Self(entries.filter_map(|entry| fs::metadata(entry.path()).ok()).collect())
    }

    /// Adds standard input.
    pub fn standard(mut self) -> Self {
        self.0.extend(descriptors::of(&io::stdin()).and_then(|f| f.metadata()));
        self
    }

    fn has(&self, file: &Metadata) -> bool {
        file.is_file() && self.0.iter().any(|input| descriptors::same(input, file))
    }
}

/// The output files of a command, by the options that name them.
#[derive(Default)]
pub struct Outputs(Vec<Output>);

struct Output {
    option: &'static str,
    path: PathBuf,
    target: Target,
}

enum Target {
    /// A regular file, with links resolved.
    Replaced(PathBuf),
    /// A pipe, a device, or standard output.
    Through(File),
}

impl Outputs {
    /// Opens the files that are asked for. Leaves no file behind, and changes none.
    pub fn open(files: &[(&'static str, Option<&Path>)], inputs: &Inputs) -> Result<Self, Failure> {
        let mut all = Self::default();
        for &(option, path) in files {
            let Some(path) = path else { continue };
            let output = Output::open(option, path, inputs)?;
            if let Some(twin) = all.0.iter().find(|other| other.is(&output)) {
                return Err(Failure::misuse(format!(
                    "{} is given for {} and {option}; name two files",
                    path.display(),
                    twin.option
                )));
            }
            all.0.push(output);
        }
        Ok(all)
    }

    /// The file of an option.
    pub fn path(&self, option: &str) -> Option<&Path> {
        self.0.iter().find(|o| o.option == option).map(|o| o.path.as_path())
    }

    /// Writes the file of an option, if it is asked for: completely or, if it is a regular file,
    /// not at all.
    pub fn write(
        &self,
        option: &str,
        fill: impl FnOnce(&mut BufWriter<&File>) -> leasehold::Result<()>,
    ) -> Result<(), Failure> {
        let Some(output) = self.0.iter().find(|o| o.option == option) else { return Ok(()) };
        let cannot = |e: io::Error| Failure::from_file(&output.path, &e);
        let write = |file: &File| {
            let mut file = BufWriter::new(file);
            fill(&mut file).map_err(|e| Failure::from(e).at(output.path.display()))?;
            file.flush().map_err(cannot)
        };
        match &output.target {
            Target::Through(file) => write(file),
            Target::Replaced(place) => {
                let (draft, file) = Draft::begin(place).map_err(cannot)?;
                write(&file)?;
                draft.finish().map_err(cannot)
            }
        }
    }
}

impl Output {
    fn open(option: &'static str, path: &Path, inputs: &Inputs) -> Result<Self, Failure> {
        let cannot = |e: io::Error| Failure::from_file(path, &e);
        let place = place(path);
        // A path that ends in a separator is none of a file, but its place is.
        let found = fs::metadata(path).or_else(|_| fs::metadata(&place)).ok();
        if let Some(found) = &found {
            if inputs.has(found) {
                return Err(Failure::misuse(format!(
                    "{}: {option} names a file that this command reads; name another file",
                    path.display()
                )));
            }
            if let Some(file) = descriptors::standard(found).map_err(cannot)? {
                if found.is_file() && !descriptors::names_one(path) {
                    return Err(Failure::misuse(format!(
                        "{}: {option} names the file of standard output or standard error; name \
                         another file, or /dev/stdout",
                        path.display()
                    )));
                }
                return Ok(Self { option, path: path.to_owned(), target: Target::Through(file) });
            }
        }
        let target = match found {
            Some(found) if !found.is_file() && !found.is_dir() => {
                Target::Through(descriptors::open(path, &found)?)
            }
            found => {
                if found.is_some_and(|f| f.is_dir()) {
                    return Err(cannot(io::ErrorKind::IsADirectory.into()));
                }
                // A file that may not be written is not replaced either.
                if place.exists() {
                    File::options().write(true).open(&place).map_err(cannot)?;
                }
                drop(Draft::begin(&place).map_err(cannot)?);
                Target::Replaced(place)
            }
        };
        Ok(Self { option, path: path.to_owned(), target })
    }

    /// Returns whether both replace one file.
    fn is(&self, other: &Output) -> bool {
        let (Target::Replaced(a), Target::Replaced(b)) = (&self.target, &other.target) else {
            return false;
        };
        let known = |path| fs::metadata(path).ok();
        a == b || known(a).zip(known(b)).is_some_and(|(a, b)| descriptors::same(&a, &b))
    }
}

/// The file of a path, with links resolved.
fn place(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default();
    fs::canonicalize(path).unwrap_or_else(|_| {
        fs::canonicalize(parent).unwrap_or_else(|_| parent.to_owned()).join(name)
    })
}

/// A file under a temporary name until it is complete. If it is dropped before that, it is removed.
struct Draft<'a> {
    beside: PathBuf,
    place: &'a Path,
}

impl<'a> Draft<'a> {
    fn begin(place: &'a Path) -> io::Result<(Self, File)> {
        let mut number = 0;
        loop {
            // A short name, which fits wherever the file's own does.
            let name = format!(".leasehold-{}-{number}", std::process::id());
            let beside = place.with_file_name(name);
            match File::options().write(true).create_new(true).open(&beside) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && number < NAMES => number += 1,
                file => {
                    let file = file?;
                    return Ok((Self { beside, place }, file));
                }
            }
        }
    }

    fn finish(self) -> io::Result<()> {
        if let Ok(before) = fs::metadata(self.place) {
            fs::set_permissions(&self.beside, before.permissions())?;
        }
        // After the rename the drop finds no file.
        fs::rename(&self.beside, self.place)
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        // The removal fails after a rename. A process that could make the file can remove it.
        let _ = fs::remove_file(&self.beside);
    }
}

/// Files by their identity, and the process's own descriptors.
#[cfg(unix)]
mod descriptors {
    use crate::failure::Failure;
    use std::fs::{File, Metadata, OpenOptions};
    use std::io;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
    use std::path::Path;

    /// Returns whether both are one file, under any name.
    pub(super) fn same(a: &Metadata, b: &Metadata) -> bool {
        (a.dev(), a.ino()) == (b.dev(), b.ino())
    }

    /// Another descriptor of an open file.
    pub(super) fn of(file: &impl AsFd) -> io::Result<File> {
        Ok(file.as_fd().try_clone_to_owned()?.into())
    }

    /// Standard output or standard error, if one of them is this file.
    pub(super) fn standard(found: &Metadata) -> io::Result<Option<File>> {
        for file in [of(&io::stdout())?, of(&io::stderr())?] {
            if same(&file.metadata()?, found) {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// Returns whether the path names a descriptor of this process.
    pub(super) fn names_one(path: &Path) -> bool {
        ["/dev", "/proc"].iter().any(|root| path.starts_with(root))
    }

    /// Opens a pipe or a device for writing. Never waits for a pipe's reader.
    pub(super) fn open(path: &Path, found: &Metadata) -> Result<File, Failure> {
        let mut how = OpenOptions::new();
        how.write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        let file = how.open(path).map_err(|e| {
            if found.file_type().is_fifo() && e.raw_os_error() == Some(libc::ENXIO) {
                let path = path.display();
                return Failure::new(format!(
                    "{path}: a pipe that nobody reads; start its reader first"
                ));
            }
            Failure::from_file(path, &e)
        })?;
        // SAFETY: the calls read and write the flags of a descriptor, which `file` keeps open.
        let set = unsafe {
            let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
            flags != -1
                && libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) != -1
        };
        if set { Ok(file) } else { Err(Failure::from_file(path, &io::Error::last_os_error())) }
    }
}

#[cfg(not(unix))]
mod descriptors {
    use crate::failure::Failure;
    use std::fs::{File, Metadata};
    use std::io;
    use std::path::Path;

    /// Without identities of files, only equal paths are found.
    pub(super) fn same(_: &Metadata, _: &Metadata) -> bool {
        false
    }

    pub(super) fn of<T>(_: &T) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn standard(_: &Metadata) -> io::Result<Option<File>> {
        Ok(None)
    }

    pub(super) fn names_one(_: &Path) -> bool {
        false
    }

    pub(super) fn open(path: &Path, _: &Metadata) -> Result<File, Failure> {
        let file = File::options().write(true).open(path);
        file.map_err(|e| Failure::from_file(path, &e))
    }
}
