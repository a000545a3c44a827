/* A FUSE file system over a folder that fails as told, like a shared one on a bad day.
 *
 *   faulty_fs FOLDER FAULTS MOUNTPOINT -f [OPTIONS]
 *
 * Each line of the file FAULTS, which is read at each call, is "CALL PART FAULT EVERY": every EVERY-th call of this
 * name for a path with this part has the fault. "*" is any call or path. Faults:
 *
 *   EIO, ESTALE, ENOSPC   the error
 *   delay                 nothing for 50 ms
 *   short                 a write of the first half
 *   lost                  success, but nothing is done
 *   unanswered            it is done, but the answer is EIO
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define RULES 16
#define LOST 1
#define UNANSWERED 2
#define SHORT 3

static int base;
static const char *faults;
static atomic_int counts[RULES];

static const char *inside(const char *path) { return path[1] ? path + 1 : "."; }

/* Returns the fault of a call: 0, a negative error, or one of the numbers above. */
static int fault(const char *call, const char *path) {
    char line[600], name[16], part[256], kind[16];
    int every, found = 0;
    FILE *file = fopen(faults, "re");
    if (!file) return 0;
    if (!path) path = ""; /* of an open file that was removed */
    for (int rule = 0; rule < RULES && fgets(line, sizeof line, file); rule++) {
        if (sscanf(line, "%15s %255s %15s %d", name, part, kind, &every) != 4 || every < 1) continue;
        if (strcmp(name, "*") && strcmp(name, call)) continue;
        if (strcmp(part, "*") && !strstr(path, part)) continue;
        if (++counts[rule] % every) continue;
        if (!strcmp(kind, "delay")) usleep(50000);
        if (!strcmp(kind, "EIO")) found = -EIO;
        if (!strcmp(kind, "ESTALE")) found = -ESTALE;
        if (!strcmp(kind, "ENOSPC")) found = -ENOSPC;
        if (!strcmp(kind, "lost")) found = LOST;
        if (!strcmp(kind, "unanswered")) found = UNANSWERED;
        if (!strcmp(kind, "short")) found = SHORT;
    }
    fclose(file);
    return found;
}

/* Does a call that changes something, with its fault. */
#define CHANGE(call, path, expression)                   \
    int wrong = fault(call, path);                       \
    if (wrong < 0) return wrong;                         \
    if (wrong == LOST) return 0;                         \
    int done = (expression) == -1 ? -errno : 0;          \
    return wrong == UNANSWERED && done == 0 ? -EIO : done

#define CHECK(call, path)          \
    int wrong = fault(call, path); \
    if (wrong < 0) return wrong

static int do_getattr(const char *path, struct stat *state, struct fuse_file_info *info) {
    CHECK("getattr", path);
    int code = info ? fstat(info->fh, state) : fstatat(base, inside(path), state, AT_SYMLINK_NOFOLLOW);
    return code == -1 ? -errno : 0;
}

static int do_readlink(const char *path, char *target, size_t size) {
    CHECK("readlink", path);
    ssize_t length = readlinkat(base, inside(path), target, size - 1);
    if (length == -1) return -errno;
    target[length] = 0;
    return 0;
}

static int do_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *info,
                      enum fuse_readdir_flags flags) {
    (void)offset, (void)info, (void)flags;
    CHECK("readdir", path);
    int folder = openat(base, inside(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *open = folder == -1 ? NULL : fdopendir(folder);
    if (!open) return -errno;
    for (struct dirent *entry; (entry = readdir(open));) fill(buffer, entry->d_name, NULL, 0, 0);
    closedir(open);
    return 0;
}

static int do_mkdir(const char *path, mode_t mode) { CHANGE("mkdir", path, mkdirat(base, inside(path), mode)); }
static int do_unlink(const char *path) { CHANGE("unlink", path, unlinkat(base, inside(path), 0)); }
static int do_rmdir(const char *path) { CHANGE("rmdir", path, unlinkat(base, inside(path), AT_REMOVEDIR)); }
static int do_symlink(const char *to, const char *path) { CHANGE("symlink", path, symlinkat(to, base, inside(path))); }
static int do_link(const char *from, const char *to) {
    CHANGE("link", to, linkat(base, inside(from), base, inside(to), 0));
}
static int do_rename(const char *from, const char *to, unsigned int flags) {
    CHANGE("rename", to, renameat2(base, inside(from), base, inside(to), flags));
}
static int do_chmod(const char *path, mode_t mode, struct fuse_file_info *info) {
    CHANGE("chmod", path, info ? fchmod(info->fh, mode) : fchmodat(base, inside(path), mode, 0));
}
static int do_chown(const char *path, uid_t user, gid_t group, struct fuse_file_info *info) {
    (void)info;
    CHANGE("chown", path, fchownat(base, inside(path), user, group, AT_SYMLINK_NOFOLLOW));
}
static int do_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *info) {
    CHANGE("utimens", path,
           info ? futimens(info->fh, times) : utimensat(base, inside(path), times, AT_SYMLINK_NOFOLLOW));
}

static int do_truncate(const char *path, off_t size, struct fuse_file_info *info) {
    int file = info ? (int)info->fh : openat(base, inside(path), O_WRONLY | O_CLOEXEC);
    if (file == -1) return -errno;
    int code = ftruncate(file, size) == -1 ? -errno : 0;
    if (!info) close(file);
    return code;
}

static int do_open(const char *path, struct fuse_file_info *info) {
    CHECK("open", path);
    int file = openat(base, inside(path), (info->flags & ~O_APPEND) | O_CLOEXEC);
    if (file == -1) return -errno;
    info->fh = file;
    return 0;
}

static int do_create(const char *path, mode_t mode, struct fuse_file_info *info) {
    CHECK("create", path);
    int file = openat(base, inside(path), (info->flags & ~O_APPEND) | O_CREAT | O_CLOEXEC, mode);
    if (file == -1) return -errno;
    info->fh = file;
    return 0;
}

static int do_read(const char *path, char *data, size_t size, off_t offset, struct fuse_file_info *info) {
    CHECK("read", path);
    ssize_t length = pread(info->fh, data, size, offset);
    return length == -1 ? -errno : (int)length;
}

static int do_write(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *info) {
    CHECK("write", path);
    if (wrong == LOST) return (int)size;
    ssize_t length = pwrite(info->fh, data, wrong == SHORT ? (size + 1) / 2 : size, offset);
    return length == -1 ? -errno : wrong == UNANSWERED ? -EIO : (int)length;
}

static int do_fsync(const char *path, int data_only, struct fuse_file_info *info) {
    (void)data_only;
    CHANGE("fsync", path, fsync(info->fh));
}

static int do_flush(const char *path, struct fuse_file_info *info) {
    (void)info;
    CHECK("close", path);
    return 0;
}

static int do_release(const char *path, struct fuse_file_info *info) {
    (void)path;
    close(info->fh);
    return 0;
}

static int do_statfs(const char *path, struct statvfs *state) {
    CHECK("statfs", path);
    return fstatvfs(base, state) == -1 ? -errno : 0;
}

/* Nothing is cached, so that each call comes here. */
static void *start(struct fuse_conn_info *connection, struct fuse_config *config) {
    (void)connection;
    config->use_ino = 1;
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
    config->hard_remove = 1;
    config->nullpath_ok = 0;
    return NULL;
}

int main(int count, char **words) {
    if (count < 4) return fprintf(stderr, "usage: faulty_fs FOLDER FAULTS MOUNTPOINT [OPTIONS]\n"), 2;
    base = open(words[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (base == -1) return perror(words[1]), 1;
    faults = words[2];
    umask(0);
    words[2] = words[0];
    struct fuse_operations calls = {
        .init = start, .getattr = do_getattr, .readlink = do_readlink, .readdir = do_readdir, .mkdir = do_mkdir,
        .unlink = do_unlink, .rmdir = do_rmdir, .symlink = do_symlink, .link = do_link, .rename = do_rename,
        .chmod = do_chmod, .chown = do_chown, .utimens = do_utimens, .truncate = do_truncate, .open = do_open,
        .create = do_create, .read = do_read, .write = do_write, .fsync = do_fsync, .flush = do_flush,
        .release = do_release, .statfs = do_statfs,
    };
    return fuse_main(count - 2, words + 2, &calls, NULL);
}
