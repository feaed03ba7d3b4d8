"""Say to the controller that a node is red: `say_red.py JOB NODE`. Prints what it is answered."""

import secrets
import sys

from gemini_hpc.config import load_site_settings
from gemini_hpc.wire import controller
from gemini_hpc.wire.handshake import Caller, HandshakeClient, HandshakeError
from gemini_hpc.wire.link import BlockingLink, LinkClosed

settings, job = load_site_settings(), int(sys.argv[1])
(host,) = settings.list_controller_hosts()
caller, uid = Caller(settings.cluster_name, sys.argv[2], secrets.token_hex(8)), settings.find_slurm_uid()
client = HandshakeClient(caller, purpose=controller.HEALTH, job=job, target=host, server_uid=uid)
try:
    link = BlockingLink.connect(host, settings.controller_port, client)
    link.send(controller.RedNode(job, 0, controller.HealthVerdict.RED))
    print(link.receive(controller.Notice).text)
except HandshakeError as error:
    print(error)
except LinkClosed:
    print("LinkClosed")
