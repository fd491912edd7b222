//! Gives the shared library its identity. The C header is not made here: see `src/ffi/header.rs`.

use std::env;

/// Suffix of the SONAME, bumped when a program built against an older version would break.
/// CMakeLists.txt reads this line.
const ABI: u32 = 0;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    build_kernels();
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    link_arg(&format!("-soname,libkvpages.so.{ABI}"));
    // Destructors of Rust thread-locals run on the engine's threads, also after a dlclose():
    // the code stays mapped.
    link_arg("-z,nodelete");
    // A missing symbol is an error here, not in the engine. A sanitizer's symbols are the
    // exception: they come with the executable.
    if env::var_os("CARGO_CFG_SANITIZE").is_none_or(|sanitizers| sanitizers.is_empty()) {
        link_arg("-z,defs");
    }
}

/// Compiles the bodies in `kernels/` for the host. They need no C++ run-time library, so that a C
/// program links to nothing new.
fn build_kernels() {
    println!("cargo::rerun-if-changed=kernels");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .opt_level(3)
        .warnings(true)
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        // The same bits everywhere, a device included.
        .flag("-ffp-contract=off")
        // Nobody asks for the exception flags, and without them loops become vectors.
        .flag("-fno-trapping-math")
        .flag("-fvisibility=hidden")
        .file("kernels/host.cc");
    if env::var("CARGO_CFG_SANITIZE").is_ok_and(|sanitizers| sanitizers.contains("address")) {
        build.flag_if_supported("-fsanitize=address");
    }
    build.compile("kvpages_kernels");
}

/// Passes an option to the linker of the cdylib, and of nothing else.
fn link_arg(option: &str) {
    println!("cargo::rustc-cdylib-link-arg=-Wl,{option}");
}
